"""What the SDKs build on top of their calls: parsed answers, accumulated streams, tool runners, raw responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI
from pydantic import BaseModel

ASK: list[Any] = [{"role": "user", "content": "How high is the water?"}]


class Level(BaseModel):
    """The level now."""

    city: Literal["Passau", "Linz"]
    rising: bool


@pytest.fixture
def client(sdk, key) -> OpenAI:
    return sdk(key)


@pytest.fixture
def claude(site, key):
    with Anthropic(base_url=site.url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_is_parsed_into_a_model(client, engine_model):
    given: Any = {"model": engine_model, "messages": ASK, "max_tokens": 200, "seed": 1}
    whole = client.chat.completions.parse(**given, response_format=Level)
    assert isinstance(whole.choices[0].message.parsed, Level)
    with client.chat.completions.stream(**given, response_format=Level) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert "content.delta" in kinds
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_a_tool_made_of_a_model_is_called_and_parsed(client, engine_model):
    given: Any = {
        "model": engine_model, "messages": ASK, "max_tokens": 300, "seed": 1, "parallel_tool_calls": False,
        "tools": [openai.pydantic_function_tool(Level)], "tool_choice": "required",
    }  # fmt: skip
    (call,) = client.chat.completions.parse(**given).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Level)
    with client.chat.completions.stream(**given) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]


def test_a_cut_off_answer_is_no_model(client, engine_model):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=engine_model, messages=ASK, max_tokens=3, response_format=Level)


def test_a_response_is_parsed_into_a_model(client, engine_model):
    given: Any = {
        "model": engine_model,
        "input": "How high?",
        "max_output_tokens": 200,
        "extra_body": {"seed": 1},
    }
    whole = client.responses.parse(**given, text_format=Level)
    assert isinstance(whole.output_parsed, Level)
    with client.responses.stream(**given, text_format=Level) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_input_tokens_are_counted_before(client, model):
    asked: Any = {"model": model, "instructions": "Be brief.", "input": "hello"}
    answer = client.responses.create(**asked, max_output_tokens=2)
    assert client.responses.input_tokens.count(**asked).input_tokens == answer.usage.input_tokens
    more: Any = {"model": model, "input": "and?", "previous_response_id": answer.id}
    longer = client.responses.create(**more, max_output_tokens=1)
    assert client.responses.input_tokens.count(**more).input_tokens == longer.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(**asked, truncation="auto")
    assert refused.value.param == "truncation"


def test_raw_and_streaming_responses(client, model):
    given: Any = {"model": model, "messages": ASK, "max_tokens": 5, "seed": 1}
    raw = client.chat.completions.with_raw_response.create(**given)
    text = raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**given, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    with client.chat.completions.create(**given, stream=True) as stream:
        assert next(stream).choices[0].delta.role == "assistant"


def test_messages_are_parsed_and_tools_are_run(claude, engine_model):
    given: Any = {"model": engine_model, "max_tokens": 300, "messages": ASK, "extra_body": {"seed": 1}}
    assert isinstance(claude.messages.parse(**given, output_format=Level).parsed_output, Level)
    with claude.messages.stream(**given, output_format=Level) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Level)
    asked: list[bool] = []

    @beta_tool
    def water_level(rising: bool) -> str:
        """The level now.

        Args:
            rising: Whether it rises.
        """
        asked.append(rising)
        return "512 cm"

    runner = claude.beta.messages.tool_runner(
        **given, tools=[water_level], tool_choice={"type": "tool", "name": "water_level"}, max_iterations=2
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages][:1] == ["tool_use"]
    assert asked
    counted = claude.beta.messages.count_tokens(model=engine_model, messages=ASK)
    assert counted.input_tokens == claude.messages.count_tokens(model=engine_model, messages=ASK).input_tokens
    with pytest.raises(anthropic.BadRequestError):
        claude.beta.messages.create(**given, thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.BadRequestError, match="'thread' is not supported"):
        claude.beta.messages.create(**given, thread={"type": "create"})
