"""Every error text of the API says what is wrong and what to do, in JSON's words and in English."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from django.test import RequestFactory

from inference import errors
from inference.outside_views import no_such_url
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.reading import read_json
from tenants import auth
from tenants.counting import counted

ROOT = Path(__file__).resolve().parents[2] / "inference"
KINDS = {
    name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ApiError)
}
STEP = re.compile(
    r"\b(add|ask|begin|cancel|choose|close|delete|end|give|leave|look|loosen|lower|make|name|resume|rotate|send|shorten|"
    r"sign in|split|tell|try|upload|use|wait|change|GET /|did you mean)\b"
    # What is allowed: the rest follows from it.
    r"|\b(at most|must|needs|is one of|there are|only|comes before|comes after|come first)\b",
    re.IGNORECASE,
)
TELL_IT_THEMSELVES = {
    "The schema is not valid: {}",
    "The grammar is not valid: {}",
    "'{}' can't be followed: {}",
    "The body is not valid JSON in UTF-8: {}.",
    "Invalid '{}': {}.",
    "The model's chat template refuses this conversation: {}",
}
"""What follows the colon is what was expected."""
COUNTED = re.compile(r"\{\} (?:output |input )?(?:tokens|requests|slots|entries|batches|exports|models)\b")


class Text(NamedTuple):
    where: str
    words: str
    parts: list[ast.expr]


def texts() -> Iterator[Text]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                for said in node.args[:1]:
                    if words := words_of(said):
                        parts = [part for part in ast.walk(said) if isinstance(part, ast.expr)]
                        yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", words, parts)


def words_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str() as words):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(words_of(part) or _placeholder(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return words_of(left) + words_of(right)
        case ast.IfExp(body=body, orelse=other):
            return min(words_of(body), words_of(other), key=lambda words: STEP.search(words) is not None)
    return ""


def _placeholder(node: ast.expr) -> str:
    is_constant = (
        isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id.isupper()
    )
    return "N" if is_constant else "{}"


def test_each_says_what_to_do():
    found = list(texts())
    assert len(found) > 100
    silent = [
        f"{text.where}: {text.words}"
        for text in found
        if not STEP.search(text.words) and text.words not in TELL_IT_THEMSELVES
    ]
    assert not silent, "\n".join(silent)
    assert {text.words for text in found} >= TELL_IT_THEMSELVES


def test_none_quotes_a_value_as_python_does():
    quoted = [
        text.where
        for text in texts()
        for part in text.parts
        if isinstance(part, ast.FormattedValue) and part.conversion == ord("r")
    ]
    assert not quoted, quoted


def test_numbers_agree_with_their_nouns():
    """What depends on the request or the tenant goes through `counted`."""
    assert (counted(1, "token"), counted(2, "token"), counted(0, "entry", "entries")) == (
        "1 token",
        "2 tokens",
        "0 entries",
    )
    bare = [f"{text.where}: {text.words}" for text in texts() if COUNTED.search(text.words)]
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize("kind", [kind for kind in vars(auth).values() if inspect.isclass(kind)])
def test_whoever_is_not_let_in_hears_what_to_do(kind):
    if issubclass(kind, auth.AuthError):
        assert STEP.search(kind.message), kind


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/chat/completion", "/api/tags"])
def test_where_no_route_is_it_is_said_where_others_are(path):
    message = json.loads(no_such_url(RequestFactory().post(path)).content)["error"]["message"]
    assert STEP.search(message), message


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [("store", "true", "false"), ("parallel_tool_calls", "7", None), ("n", '"two"', None)],
)
def test_values_are_told_as_json_writes_them(field, value, same):
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    with pytest.raises(errors.InvalidRequest) as refused:
        read_json(body.encode(), ChatCompletionRequest).check()
    assert not re.search(r"\b(True|False|None)\b", refused.value.message), refused.value.message
    if same is not None:
        assert refused.value.message.endswith(f"leave it out, or give {same}.")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty, send a JSON object"),
        (b" \n", "it is empty, send a JSON object"),
        (b"[]", "must be a JSON object, its type is 'array'"),
        (b"3", "must be a JSON object, its type is 'integer'"),
        (
            b'{"model": "m", "messages": [{"role": "user"}], "max_token": 3}',
            "unknown field 'max_token'; the nearest is 'max_tokens'",
        ),
        (
            b'{"messages": [{"role": "user"}], "response_format": {"type": "json_schema", "json_shema": 1}}',
            "unknown field 'json_shema'; the nearest is 'json_schema'",
        ),
        (b'{"model": "m", "messages": [{"role": "user"}], "xyzzy": 3}', "unknown field 'xyzzy'."),
    ],
)
def test_a_body_that_is_none_and_a_misspelt_field_are_told(body, said):
    with pytest.raises(errors.InvalidRequest) as refused:
        read_json(body, ChatCompletionRequest)
    assert said in refused.value.message
