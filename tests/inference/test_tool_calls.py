"""Tool calls in text: taken apart whole, in pieces and where they are none; and forced by a grammar."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from inference.errors import InvalidRequest
from inference.schemas.tools import FunctionDefinition, Tool
from inference.tool_calls import (
    ArgumentsText,
    CallStarted,
    Style,
    ToolCallParser,
    ToolFormat,
    call_grammar,
    tool_format,
)
from tests.engine_worker.models import byte_tokenizer

TAGGED, BARE = ToolFormat(Style.TAGGED, "arguments"), ToolFormat(Style.BARE, "parameters")
ONE = '<tool_call>\n{"name": "look", "arguments": {"at": "a } \\" {", "n": [1, {"x": 2}]}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>\n'


def parse(form: ToolFormat, pieces) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form)
    text, calls, ids = "", [], set()
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.close():
        if isinstance(part, str):
            text += part
        elif isinstance(part, CallStarted):
            assert part.index == len(calls)
            calls.append((part.name, ""))
            ids.add(part.id)
        else:
            assert isinstance(part, ArgumentsText)
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
    assert len(ids) == len(calls) == parser.num_calls
    return text, calls


LOOK = ("look", '{"at": "a } \\" {", "n": [1, {"x": 2}]}')
CASES = [
    (TAGGED, "just text <tool", "just text <tool", []),
    (TAGGED, ONE, "", [LOOK]),
    (TAGGED, "I look. " + TWO, "I look.", [LOOK, ("go", "{}")]),
    (TAGGED, "<tool_call>no json</tool_call> so", "<tool_call>no json</tool_call> so", []),
    (TAGGED, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (TAGGED, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    (BARE, ' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        BARE,
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        BARE,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (BARE, '{"name": "f", "parameters": {}} is how', '{"name": "f", "parameters": {}} is how', []),
    (BARE, "{not json}", "{not json}", []),
    (BARE, "text {}", "text {}", []),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_whole_and_character_by_character(form, answer, text, calls):
    assert parse(form, [answer]) == (text, calls)
    assert parse(form, answer) == (text, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=6))
def test_any_split_gives_the_same(case, cuts):
    form, answer, text, calls = case
    at = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    pieces = [answer[a:b] for a, b in pairwise(at)]
    assert parse(form, pieces) == (text, calls)


def test_arguments_are_streamed_as_they_come():
    parser = ToolCallParser(TAGGED)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    started, first = parser.feed('{"a": ')
    assert isinstance(started, CallStarted)
    assert first == ArgumentsText(0, '{"a": ')
    assert parser.feed('"b"') == [ArgumentsText(0, '"b"')]


TOOLS = [
    Tool("function", FunctionDefinition("look", parameters={
        "type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
        "additionalProperties": False, "$defs": {"place": {"enum": ["here", "there"]}},
    })),
    Tool("function", FunctionDefinition("go")),
]  # fmt: skip


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("form", "many", "answer", "is_allowed"),
    [
        (TAGGED, False, '<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>', True),
        (TAGGED, False, '<tool_call>\n{"name": "look", "arguments": {"at": "mars"}}\n</tool_call>', False),
        (TAGGED, False, '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>', False),
        (TAGGED, False, '<tool_call>\n{"name": "go", "arguments": {"a": [1]}}\n</tool_call>', True),
        (TAGGED, True, TWO.strip().replace(ONE, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'), True),
        (BARE, False, '{"name": "look", "parameters": {"at": "there"}}', True),
        (BARE, True, '[{"name": "go", "parameters": {}}, {"name": "go", "parameters": {}}]', True),
        (BARE, False, '[{"name": "go", "parameters": {}}]', False),
    ],
)  # fmt: skip
def test_the_grammar_lets_calls_through_and_nothing_else(has_tokens, form, many, answer, is_allowed):
    tokenizer = byte_tokenizer()
    tags = ["<tool_call>", "</tool_call>"] if has_tokens else []
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    grammar = call_grammar(form, TOOLS, many=many, control=tags)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=256), grammar, log_level=0)
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert accepted == is_allowed
    if is_allowed:
        _, calls = parse(form, [answer])
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert calls


@pytest.mark.parametrize("form", [TAGGED, BARE])
@pytest.mark.parametrize("answer", ['{"level": 3}', '{"level":3}', '{"level": "low"}', "{}", "three", ""])
def test_a_form_lets_an_answer_or_a_call_through_and_nothing_else(form, answer):
    schema = {
        "type": "object", "properties": {"level": {"type": "integer"}}, "required": ["level"],
        "additionalProperties": False,
    }  # fmt: skip
    grammar = call_grammar(form, TOOLS, many=True, control=[], answer=schema)
    tokenizer = byte_tokenizer()
    call = f'{{"name": "go", "{form.key}": {{}}}}'
    call = f"<tool_call>\n{call}\n</tool_call>" if form is TAGGED else call
    for text, is_allowed in ((call, True), (answer, answer in ('{"level": 3}', '{"level":3}'))):
        matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=256), grammar, log_level=0)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_allowed
    assert parse(form, [answer]) == (answer, [])


def test_formats_are_told_by_the_template():
    assert tool_format("{{ tools }} <tool_call>") == TAGGED
    assert tool_format('{{ tools }} {"name": ..., "parameters": ...}') == BARE
    assert tool_format("{{ tools }} [TOOL_CALLS]") == ToolFormat(Style.BARE, "arguments")
    for template in (None, "{{ messages }}"):
        with pytest.raises(InvalidRequest, match="takes no tools"):
            tool_format(template)
