"""Whatever comes in: the SSE framer, the websocket's frames, the chat template and the JSON reader hold."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

import anthropic._streaming
import jsonschema
import msgspec
import openai._streaming
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.api.openapi import ApiDocument
from inference.api.sse import _KEEP_ALIVE, Position, event
from inference.api.urls import api_document
from inference.errors import InvalidRequest
from inference.prompts import Message
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.chat_socket import ClientFrame
from inference.schemas.reading import read_json, read_json_frame
from tests.inference.test_prompts import END, START, renderer, tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
many = settings(max_examples=200, deadline=None)


@pytest.mark.parametrize("decoder", [openai._streaming.SSEDecoder, anthropic._streaming.SSEDecoder])
@many
@given(
    sent=st.lists(st.tuples(VALUE, st.sampled_from(["", "12", "7."]), st.sampled_from(["", "a.b", "error"])))
)
@example(sent=[("\r\n data: x\u2028\x85", "", "")])
@example(sent=[({}, "12", ""), ({}, "13", "")])
def test_every_event_and_no_other_comes_through_an_independent_reader(sent, decoder):
    wire = b"".join(event(data, event_id, name=name) + _KEEP_ALIVE for data, event_id, name in sent)

    def pieces() -> Iterator[bytes]:
        yield from (wire[start : start + 7] for start in range(0, len(wire), 7))

    read = list(decoder().iter_bytes(pieces()))
    assert [(json.loads(each.data), each.event or "") for each in read] == [
        (data, name) for data, _, name in sent
    ]


@many
@given(text=TEXT | st.from_regex(r"\d{1,12}(\.\d?)?", fullmatch=True))
def test_event_ids_are_read_back_or_refused(text):
    try:
        position = Position.parse(text)
    except ValueError:
        return
    assert Position.parse(str(position)) == position


@many
@given(body=st.binary(max_size=200) | VALUE.map(lambda value: json.dumps(value).encode()))
@example(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}')
@example(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}')
@example(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}')
@example(b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}')
@example(b'{"model": "m", "messages": ' + b"[" * 100_000)
@example(b'{"model": "m", "metadata": ' + b'{"a":' * 100_000)
@example(b"\xef\xbb\xbf{}")
def test_a_body_is_read_or_refused(body):
    refused: InvalidRequest | None = None
    try:
        read = read_json(body, ChatCompletionRequest)
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert 0 < len(refused.message) < 4000
    else:
        # What was taken can be said again.
        assert msgspec.json.decode(msgspec.json.encode(read), type=ChatCompletionRequest) == read


def test_of_a_key_that_comes_twice_the_last_counts():
    body = b'{"model": "a", "model": "b", "messages": [{"role": "user", "content": "x"}]}'
    assert read_json(body, ChatCompletionRequest).model == "b"


CLIENT = api_document.value["x-weir-websockets"]["/ws/chat"]["client"]


def validator(
    schema: dict[str, Any], document: ApiDocument = api_document
) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document.value["components"]})


FRAME = st.fixed_dictionaries(
    {"type": st.sampled_from(["start", "stop", "resume", "other"])},
    optional={
        "id": st.sampled_from(["", "a", "x" * 65]) | VALUE,
        "model": st.just("m") | VALUE,
        "messages": st.just([{"role": "user", "content": "hi"}]) | VALUE,
        "request_id": st.just("r") | VALUE,
        "from_seq": st.integers(-2, 5) | VALUE,
        "params": st.dictionaries(
            st.sampled_from(["max_tokens", "top_p", "stop", "seed", "odd"]), VALUE, max_size=2
        ),
        "tenant": st.none() | TEXT,
        "extra": VALUE,
    },
)
GOOD = {"type": "start", "id": "a", "model": "m", "messages": [{"role": "user", "content": "hi"}]}


@many
@given(frame=FRAME | FRAME.map(lambda more: GOOD | {name: more[name] for name in more if name != "type"}))
@example(GOOD)
@example({"type": "stop", "id": "a"})
def test_frames_are_taken_exactly_when_their_schema_takes_them(frame):
    try:
        read_json_frame(json.dumps(frame).encode(), ClientFrame)
        is_taken = True
    except InvalidRequest:
        is_taken = False
    assert is_taken == validator(CLIENT).is_valid(frame), frame


ROLES = st.sampled_from(["system", "user", "assistant"])
WORDS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "{{ 7 }}", "{% raw %}", "\n", "system"]
)
SPEECH = st.lists(WORDS | st.text(string.printable, max_size=5), max_size=6).map("".join) | TEXT


@many
@given(turns=st.lists(st.tuples(ROLES, SPEECH), min_size=1, max_size=4))
def test_whatever_is_said_the_template_alone_makes_control_tokens(turns):
    ids = renderer().chat([Message(*turn) for turn in turns])
    assert (ids.count(START), ids.count(END)) == (len(turns) + 1, len(turns))
    text = tokenizer().decode([each for each in ids if each not in (START, END)], skip_special_tokens=False)
    for _, said in turns:
        assert said in text


def test_the_schema_of_the_servers_frames_is_there():
    names = {each["$ref"].rpartition("/")[2] for each in
             api_document.value["x-weir-websockets"]["/ws/chat"]["server"]["anyOf"]}  # fmt: skip
    assert names == {"Started", "Delta", "UsageFrame", "Done", "ErrorFrame"}
    schema = api_document.value["x-weir-websockets"]["/ws/chat"]["server"]
    validator(schema).validate({"type": "delta", "id": "a", "seq": 0, "text": "", "tokens": 1})
    with pytest.raises(jsonschema.ValidationError):
        validator(schema).validate({"type": "delta", "id": "a"})
