"""JSON Schemas of msgspec's structs, with the words that stand below their fields in the source.

Source: JSON Schema 2020-12, which msgspec writes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, Final

import msgspec

_REF: Final = "#/components/schemas/{name}"
_WITH_FIELDS: Final = (
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
)


class Schemas:
    """Those of all types at once, by one name each."""

    def __init__(self, types: list[Any]) -> None:
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REF)
        self._schemas = [(kind, schema) for kind, schema in zip(types, schemas, strict=True)]
        for cls, names in _classes(types).items():
            texts = _field_texts(cls)
            properties = self.components.get(cls.__name__, {}).get("properties", {})
            for name, encoded_name in names.items():
                if name in texts and encoded_name in properties:
                    properties[encoded_name].setdefault("description", texts[name])

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for each, schema in self._schemas if each is kind or each == kind)


def _classes(types: Iterable[Any]) -> dict[type, dict[str, str]]:
    """Every struct, dataclass and typed dictionary that the types are made of: its fields' names, and those in JSON."""
    found: dict[type, dict[str, str]] = {}

    def visit(info: Any) -> None:
        if isinstance(info, _WITH_FIELDS):
            if info.cls in found:
                return
            found[info.cls] = {field.name: field.encode_name for field in info.fields}
            for field in info.fields:
                visit(field.type)
        for name in ("types", "item_type", "item_types", "key_type", "value_type", "type"):
            inner = getattr(info, name, None)
            for each in inner if isinstance(inner, tuple) else [inner]:
                if isinstance(each, msgspec.inspect.Type):
                    visit(each)

    for info in msgspec.inspect.multi_type_info(types):
        visit(info)
    return found


def _field_texts(cls: type) -> dict[str, str]:
    """The string below each field of the class and of those above it, as the source has it, by the field's name."""
    texts: dict[str, str] = {}
    for each in cls.__mro__[::-1]:
        if each.__module__.partition(".")[0] in ("builtins", "msgspec"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                texts[statement.target.id] = " ".join(following.value.value.split())
    return texts
