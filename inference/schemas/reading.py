"""Bytes to a request struct, and every way that it can fail to be one, as an InvalidRequest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_origin

import msgspec

from inference.errors import InvalidRequest
from inference.schemas.choices_of import choices_of, fields_of

_Request = TypeVar("_Request", bound=msgspec.Struct)
_PATH = re.compile(r" - at (?:`(?P<key>key)` in )?`\$\.?(?:\[\.\.\.\])?(?P<path>.*)`$")
_TYPES = re.compile(r"\b(expected|got) `([^`]*)`", re.IGNORECASE)
_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_CHOICE = re.compile(r"invalid (?:enum )?value ")
_NO_OBJECT = re.compile(r"expected 'object', got '(.*)'$")
_UNKNOWN_FIELD = re.compile(r"unknown field '(\w+)'$")
_NAMED_FIELD = re.compile(r"(?:unknown field|missing required field) `(\w+)`")


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read_json(body: bytes, kind: type[_Request]) -> _Request:
    """The request in `body`. Raises InvalidRequest with `param` where a field is at fault."""
    request: _Request = read_json_frame(body, kind)
    return request


def read_json_frame(body: bytes, kind: Any) -> Any:
    """The same for a union of structs, told apart by their tag."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_sentence(str(error), kind), param=_param(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {_reason(body, error)}.") from error


def read_value(value: Any, kind: Any, *, where: str) -> Any:
    """The same for a part of a body, at the path `where`, that was read as plain values before."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        inside = _param(str(error))
        path = f"{where}.{inside}" if inside else where
        raise InvalidRequest(f"Invalid '{path}': {_said(str(error), kind)}.", param=path) from error


def read_query(given: dict[str, list[str]], kind: type[_Request]) -> _Request:
    """A query's parameters, those that `kind` has; where it has a value and no list, the last one counts."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if texts := given.get(field.encode_name):
            is_list = get_origin(field.type) is list
            values[field.encode_name] = texts if is_list else texts[-1]
    if named := next((name for name, value in values.items() if "\0" in value), None):
        raise InvalidRequest(f"Invalid '{named}': it holds a NUL character. Leave that out.", param=named)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_sentence(str(error), kind), param=_param(str(error))) from error


def refuse_unknown(given: Iterable[str], kind: type[msgspec.Struct]) -> None:
    """Raises InvalidRequest where a query has a parameter that `kind` has not."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    if name := next((name for name in given if name not in known), None):
        raise InvalidRequest(
            f"There is no parameter '{name[:80]}' here: use {', '.join(known)}.", param=name[:80]
        )


def _reason(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "it is empty, send a JSON object"
    # msgspec calls half a surrogate pair truncated data, which sends its reader looking in the wrong place.
    if _SURROGATE.search(body) and str(error) == "Input data was truncated":
        return "a string holds half of a surrogate pair (one of \\ud800 to \\udfff alone)"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def _param(message: str) -> str | None:
    path = _path(message)
    parts = [path.removesuffix("[...]")] if path else []
    if named := _NAMED_FIELD.search(message):
        parts.append(named[1])
    return ".".join(parts) or None


def _sentence(message: str, kind: Any) -> str:
    """msgspec's message without its notation for paths; `param` says where."""
    said = _said(message, kind)
    path = _path(message)
    if not path:
        if found := _NO_OBJECT.match(said):
            return f"The body must be a JSON object, its type is '{found[1]}'."
        return f"{said[0].upper()}{said[1:]}."
    found = _PATH.search(message)
    if found and found["key"]:
        return f"Invalid key in '{path}': {said}."
    if path.endswith("[...]"):  # msgspec does not say under which key
        return f"Invalid value in '{path.removesuffix('[...]')}': {said}."
    return f"Invalid '{path}': {said}."


def _path(message: str) -> str:
    """Of the field at fault, as msgspec writes it; "": the body itself."""
    found = _PATH.search(message)
    return found["path"] if found else ""


def _said(message: str, kind: Any) -> str:
    text = _TYPES.sub(lambda found: f"{found[1]} `{_in_json(found[2])}`", _PATH.sub("", message))
    text = text.replace("`", "'")
    text = f"{text[0].lower()}{text[1:]}"
    path = _path(message)
    if unknown := _UNKNOWN_FIELD.search(text):
        alike = get_close_matches(unknown[1], fields_of(kind, path), n=1)
        return f"{text}; the nearest is '{alike[0]}'" if alike else text
    if path and _NO_CHOICE.match(text) and (words := choices_of(kind, path)):
        text += ": use " + " or ".join(f"'{word}'" for word in words)
    return text


def _in_json(types: str) -> str:
    """Python's names of types as JSON has them."""
    return " or ".join(_JSON_WORDS.get(name, name) for name in types.split(" | "))
