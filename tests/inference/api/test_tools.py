"""Tools through the SDK: offered, forced, called, answered, refused."""

from __future__ import annotations

import json

import openai
import pytest

ASK = [{"role": "user", "content": "How high is the water in Passau?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "water_level",
        "description": "The level now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Passau", "Linz"]}, "cm": {"type": "boolean"}},
            "required": ["city", "cm"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "bye", "parameters": {"type": "object", "properties": {},
         "additionalProperties": False}}}  # fmt: skip


@pytest.fixture
def chat(sdk, key, engine_model):
    def create(seed=1, **given):
        body = {"messages": ASK, "max_tokens": 300, "seed": seed, "tools": [TOOL, OTHER]} | given
        return sdk(key).chat.completions.create(model=engine_model, **body)

    return create


NAMED = {"type": "function", "function": {"name": "water_level"}}


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called(chat, seed):
    (choice,) = chat(seed, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.type, call.function.name) == ("function", "water_level")
    assert call.id.startswith("call_")
    assert json.loads(call.function.arguments).keys() == {"city", "cm"}


def test_required_and_streamed_says_the_same(chat):
    given = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = chat(**given).choices[0].message.tool_calls
    assert whole.function.name in ("water_level", "bye")
    name, arguments, reason, pieces = "", "", None, 0
    for chunk in chat(stream=True, **given):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments
            pieces += 1
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert reason == "tool_calls"
    assert pieces >= 2


def test_auto_and_none_leave_the_model_free(chat):
    favoured = {str(i): -100 for i in range(258) if not 97 <= i <= 122}
    auto = chat(logit_bias=favoured, max_tokens=6)
    assert len(auto.choices[0].message.content) == 6
    assert auto.choices[0].message.tool_calls is None
    assert auto.choices[0].finish_reason == "length"
    none = chat(logit_bias=favoured, max_tokens=6, tool_choice="none")
    # Tools that may not be called are not told to the model.
    assert none.usage.prompt_tokens == len(f"user: {ASK[0]['content']}\nassistant:")
    assert auto.usage.prompt_tokens > none.usage.prompt_tokens + 100


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("seed", range(3))
def test_only_an_allowed_tool_is_called(chat, seed):
    (choice,) = chat(seed, tool_choice=allowed("required", "bye"), parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["bye"]
    assert choice.finish_reason == "tool_calls"


def test_the_model_is_told_of_the_allowed_tools_alone(chat):
    def prompt_tokens(**given):
        return chat(max_tokens=1, **given).usage.prompt_tokens

    one = prompt_tokens(tools=[OTHER])
    assert prompt_tokens(tool_choice=allowed("auto", "bye")) == one
    both = allowed("auto", "bye", "water_level")
    assert prompt_tokens(tool_choice=both) == prompt_tokens() > one


def test_a_call_and_its_answer_reach_the_template(chat):
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "water_level", "arguments": '{"city": "Passau", "cm": true}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "512"},
    ]  # fmt: skip
    usage = chat(messages=turns, tool_choice="none", max_tokens=1).usage
    text = f"user: {ASK[0]['content']}\nassistant: <tool_call>Passau</tool_call>\ntool: 512\nassistant:"
    assert usage.prompt_tokens == len(text)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": allowed("auto", "bye", "nope")}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("any", "bye")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [], "tool_choice": allowed("auto", "bye")}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
         "response_format"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(chat, given, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**given)
    assert refused.value.param == param


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"cm": {"enum": [1, 2]}},
            "required": ["cm"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("seed", range(6))
def test_with_a_form_the_model_calls_or_answers_in_it(chat, seed):
    (choice,) = chat(seed, response_format=FORM, parallel_tool_calls=False).choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
        assert {call.function.name for call in choice.message.tool_calls} <= {"water_level", "bye"}
    else:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content) in ({"cm": 1}, {"cm": 2})


def test_a_forced_call_leaves_no_answer_to_have_a_form(chat):
    (choice,) = chat(tool_choice=NAMED, response_format=FORM).choices
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "water_level"


def test_a_model_whose_template_takes_no_tools_says_so(sdk, key, model):
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        sdk(key).chat.completions.create(model=model, messages=ASK, tools=[TOOL])
