"""What a field of a request would take, for who gave it something else: read off the structs that check it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import inspect

_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def choices_of(kind: Any, path: str) -> list[str]:
    """The words that the field at msgspec's `path` in a `kind` may be; none where it is no choice of words."""
    words: dict[str, None] = {}
    for node in _at(kind, path):
        if isinstance(node, inspect.LiteralType):
            words |= dict.fromkeys(str(value) for value in node.values)
        elif isinstance(node, inspect.EnumType):
            words |= dict.fromkeys(str(member.value) for member in node.cls)
    return list(words)


def fields_of(kind: Any, path: str) -> list[str]:
    """The fields of the objects that may stand at msgspec's `path` in a `kind`."""
    objects = (node for node in _at(kind, path) if isinstance(node, inspect.StructType))
    return list(dict.fromkeys(field.encode_name for node in objects for field in node.fields))


def _at(kind: Any, path: str) -> list[inspect.Type]:
    nodes: list[inspect.Type] = list(_plain(inspect.type_info(kind)))
    for step in _STEP.findall(path):
        nodes = [found for node in nodes for inner in _inside(node, step) for found in _plain(inner)]
    return nodes


def _plain(node: inspect.Type) -> Iterator[inspect.Type]:
    """Without the wrapping: each member of a union."""
    if isinstance(node, inspect.Metadata):
        yield from _plain(node.type)
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _plain(one)
    else:
        yield node


def _inside(node: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.ListType) and step.startswith("["):
        yield node.item_type
    elif isinstance(node, inspect.DictType) and step.startswith("["):
        yield node.value_type
    elif isinstance(node, inspect.StructType):
        if step == node.tag_field:
            yield inspect.LiteralType((node.tag,))
        yield from (field.type for field in node.fields if field.encode_name == step)
