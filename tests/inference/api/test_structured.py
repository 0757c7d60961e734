"""Answers that follow a schema, a regular expression or a grammar; and what can't be followed."""

from __future__ import annotations

import json
import re

import openai
import pytest

ASK = [{"role": "user", "content": "Describe a weir."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "height_m": {"type": "number", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["broad", "sharp"]},
    },
    "required": ["height_m", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def chat(sdk, key, engine_model):
    def create(seed=1, **given):
        body = {"messages": ASK, "max_tokens": 300, "seed": seed} | given
        return sdk(key).chat.completions.create(model=engine_model, **body)

    return create


def schema_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "weir", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(chat, seed):
    (choice,) = chat(seed, response_format=schema_format(SCHEMA)).choices
    weir = json.loads(choice.message.content)
    assert weir.keys() == {"height_m", "kind"}
    assert weir["kind"] in ("broad", "sharp")
    assert choice.finish_reason == "stop"


def test_json_schema_streamed_in_several_choices(chat):
    texts = ["", "", ""]
    for chunk in chat(response_format=schema_format(SCHEMA), n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(json.loads(text).keys() == {"height_m", "kind"} for text in texts)


def test_json_object(chat):
    # A random model would fill strings for ever: they are kept short by what it favours.
    favoured = {str(ord(char)): 12 for char in '"}'}
    (choice,) = chat(response_format={"type": "json_object"}, logit_bias=favoured).choices
    assert isinstance(json.loads(choice.message.content), dict)
    assert chat(response_format={"type": "text"}, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("field", ["structured_outputs", "guided"])
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("regex", "[a-f]{3}-[0-9]{2}", "[a-f]{3}-[0-9]{2}"),
        ("choice", ["up", 'down "and" out'], 'up|down "and" out'),
        ("grammar", 'start: "x" /[0-9]+/ "y" | "z"', "x[0-9]+y|z"),
        ("grammar", 'root ::= "a" [0-9] "b"', "a[0-9]b"),
        ("json", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, r"\[.*\]"),
    ],
)
def test_other_forms(chat, field, kind, value, expected):
    extra = (
        {"structured_outputs": {kind: value}} if field == "structured_outputs" else {f"guided_{kind}": value}
    )
    digits = {str(i): -5 for i in range(48, 58)}
    (choice,) = chat(extra_body=extra, logit_bias=digits).choices
    assert re.fullmatch(expected, choice.message.content, re.S)


def test_completions_take_them_as_well(sdk, key, engine_model):
    answer = sdk(key).completions.create(
        model=engine_model, prompt="x", max_tokens=9, extra_body={"guided_regex": "[0-9]{4}"}
    )
    assert re.fullmatch("[0-9]{4}", answer.choices[0].text)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"response_format": schema_format({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": schema_format({"$ref": "#/nowhere"})}, "response_format", "nowhere"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": schema_format({"type": "object", "if": {}})}, "response_format", '"if"'),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "unclosed group"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: a"}}}, "structured_outputs.grammar", "a"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_regex", "Only one"),
        ({"extra_body": {"guided_regex": r"[^\s\S]"}}, "guided_regex", "no text"),
        ({"extra_body": {"guided_grammar": "start: start"}}, "guided_grammar", "no text"),
        ({"extra_body": {"guided_grammar": "root ::= root"}}, "guided_grammar", "no text"),
    ],
    ids=str,
)
def test_fault_27_what_cannot_be_followed_is_a_400_with_the_reason(chat, given, param, words):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**given)
    assert refused.value.param.startswith(param)
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("extra", "words", "stream"),
    [
        ({"guided_choice": ["a"], "bad_words": ["a"]}, "No token may come next", False),
        ({"guided_choice": ["a"], "bad_words": ["a"]}, "No token may come next", True),
        ({"guided_grammar": 'start: "a" start'}, "could not follow its grammar", False),
    ],
)
def test_fault_27_what_only_the_engine_finds_out_is_a_400_as_well(chat, extra, words, stream):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        list(chat(extra_body=extra, stream=stream))
    assert refused.value.type == "invalid_request_error"


def test_a_grammar_of_the_models_own_tokens_is_not_refused_for_them(chat):
    (choice,) = chat(extra_body={"guided_grammar": 'start: "a" <[98]> "c"'}).choices
    assert choice.message.content == "abc"
