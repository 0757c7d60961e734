"""The OpenAPI document as a page: what each operation takes and gives, in rows that a template can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_NAMES_TOLD: Final = 12
_LARGE: Final = 10**6
"""Bounds beyond it are the machine's, not the reader's."""


@dataclass(frozen=True, slots=True)
class FieldRow:
    name: str
    kind: str
    is_required: bool
    text: str


@dataclass(frozen=True, slots=True)
class OperationRow:
    id: str
    method: str
    path: str
    summary: str
    text: str
    parameters: list[FieldRow]
    fields: list[FieldRow]
    """Of the body."""
    answers: list[tuple[str, str]]
    """Status, and what it means or holds."""


def operation_rows(document: dict[str, Any]) -> dict[str, list[OperationRow]]:
    """By the first word of the path, in the document's order."""
    schemas = document["components"]["schemas"]
    rows: dict[str, list[OperationRow]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            row = OperationRow(
                id=operation["operationId"],
                method=method.upper(),
                path=path,
                summary=operation["summary"],
                text=operation["description"].replace("`", ""),
                parameters=[
                    FieldRow(
                        each["name"],
                        f"{_kind(each['schema'])}, {each['in']}",
                        each.get("required", False),
                        each.get("description", ""),
                    )
                    for each in operation["parameters"]
                ],
                fields=list(_fields(operation, schemas)),
                answers=[
                    (status, _answer(status, answer)) for status, answer in operation["responses"].items()
                ],
            )
            rows.setdefault(operation["tags"][0], []).append(row)
    return rows


def struct_rows(document: dict[str, Any]) -> dict[str, list[FieldRow]]:
    """Every named schema's fields."""
    return {
        name: list(_properties(schema))
        for name, schema in document["components"]["schemas"].items()
        if not name.endswith(("Query", "Upload"))
    }


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[FieldRow]:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _properties(schemas[content["schema"]["$ref"].rpartition("/")[2]])


def _properties(schema: dict[str, Any]) -> Iterator[FieldRow]:
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    for name, each in sorted(properties.items(), key=lambda item: item[0] not in required):
        yield FieldRow(name, _kind(each), name in required, each.get("description", ""))


def _answer(status: str, answer: dict[str, Any]) -> str:
    if not status.startswith("2"):
        text: str = answer["description"]
        return text
    kinds = []
    for media_type, content in answer["content"].items():
        schema = content.get("x-weir-event-data", content["schema"])
        kinds.append(f"{_kind(schema)} ({media_type})")
    return "; or ".join(kinds)


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if ref := schema.get("$ref"):
        return str(ref).rpartition("/")[2].rpartition(".")[2]
    if values := schema.get("enum"):
        told = [str(value) for value in values[:_NAMES_TOLD]]
        return " | ".join(told)
    if several := schema.get("anyOf"):
        kinds = [_kind(each) for each in several if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("type", "anything")
    if kind == "array":
        of = schema["prefixItems"][0] if "prefixItems" in schema else schema.get("items", {})  # a tuple's
        return f"list of {_kind(of)}"
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if least is not None and most is not None and most < _LARGE:
        return f"{kind} {least:g} to {most:g}"
    return f"{kind} from {least:g}" if least is not None and least > -_LARGE else str(kind)
