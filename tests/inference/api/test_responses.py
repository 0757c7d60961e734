"""`/v1/responses` with the unmodified `openai` SDK against the running product."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import openai
import pytest
from django.utils import timezone

from inference.models import StoredResponse
from inference.services.responses import delete_expired_responses
from tests.factories import make_key

TOOL: Any = {
    "type": "function",
    "name": "water_level",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "cm": {"type": "boolean"}},
        "required": ["city", "cm"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(sdk, key):
    return sdk(key)


def ended(client, response_id: str, timeout_s: float = 30):
    deadline = time.monotonic() + timeout_s
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_whole_is_stored_and_found_again(client, model):
    answer = client.responses.create(
        model=model,
        input="hello",
        instructions="Be brief.",
        max_output_tokens=7,
        metadata={"a": "b"},
        extra_body={"seed": 1},
    )
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", model)
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert len(answer.output_text) == 7
    assert (answer.usage.output_tokens, answer.metadata) == (7, {"a": "b"})
    assert answer.usage.total_tokens == answer.usage.input_tokens + 7
    assert client.responses.retrieve(answer.id) == answer


def test_the_same_words_as_chat_completions(client, model):
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": "A"}, {"role": "user", "content": "b"}],
        max_tokens=5,
        seed=3,
    )
    answer = client.responses.create(
        model=model,
        instructions="A",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "b"}]}],
        max_output_tokens=5,
        extra_body={"seed": 3},
    )
    assert answer.output_text == chat.choices[0].message.content


def test_streamed_in_typed_events(client, model):
    given: Any = {"model": model, "input": "hello", "max_output_tokens": 9, "extra_body": {"seed": 5}}
    whole = client.responses.create(**given, store=False)
    events = list(client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response


def test_store_false_keeps_nothing(client, model):
    answer = client.responses.create(model=model, input="x", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_conversation_goes_on(client, model):
    first = client.responses.create(model=model, input="one", instructions="gone", max_output_tokens=4)
    second = client.responses.create(
        model=model,
        input="two",
        previous_response_id=first.id,
        max_output_tokens=4,
        extra_body={"seed": 2},
    )
    chat = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "two"},
        ],
        max_tokens=4,
        seed=2,
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id
    third = client.responses.create(
        model=model, input="three", previous_response_id=second.id, max_output_tokens=1
    )
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens - len("gone")
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == ["two"]
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=model, input="x", previous_response_id="resp-" + "0" * 32)
    assert (bad.value.code, bad.value.param) == ("previous_response_not_found", "previous_response_id")


def test_delete_and_expiry(client, model):
    kept = client.responses.create(model=model, input="x", max_output_tokens=1)
    gone = client.responses.create(model=model, input="x\0", max_output_tokens=1)
    client.responses.delete(gone.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve(gone.id)
    assert missing.value.code == "response_not_found"
    late = timezone.now() - timedelta(seconds=1)
    StoredResponse.unscoped.filter(response_id=kept.id).update(expires_at=late)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    assert delete_expired_responses() == 1
    assert not StoredResponse.unscoped.filter(response_id=kept.id).exists()


def test_another_tenant_finds_nothing(client, sdk, model):
    mine = client.responses.create(model=model, input="x", max_output_tokens=1)
    outsider = sdk(make_key().secret)
    for ask in (outsider.responses.retrieve, outsider.responses.delete, outsider.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(mine.id)
    with pytest.raises(openai.BadRequestError):
        outsider.responses.create(model=model, input="x", previous_response_id=mine.id)
    assert client.responses.retrieve(mine.id).id == mine.id


def test_in_the_background(client, model):
    begun = client.responses.create(model=model, input="x", max_output_tokens=20, background=True)
    assert (begun.status, begun.output) == ("queued", [])
    with pytest.raises(openai.ConflictError):
        client.responses.create(model=model, input="y", previous_response_id=begun.id)
    done = ended(client, begun.id)
    assert (done.status, len(done.output_text)) == ("incomplete", 20)
    assert done.usage.output_tokens == 20


def test_what_outlives_its_request_gives_its_database_connection_back(client, http, model):
    for _ in range(12):  # a gateway has ten, WEIR_DATABASE_POOL
        begun = client.responses.create(model=model, input="x", max_output_tokens=1, background=True)
        asked = {"model": model, "prompt": "x", "max_tokens": 1}
        http.post("completions", json=asked, headers={"Idempotency-Key": begun.id}).raise_for_status()
        assert ended(client, begun.id).status == "incomplete"
    assert http.get("files").status_code == 200


def test_a_background_response_is_cancelled(client, model):
    begun = client.responses.create(model=model, input="x", max_output_tokens=2000, background=True)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    other = client.responses.create(model=model, input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(other.id)


def test_a_background_response_outlives_its_gateway(site, sdk, key, model):
    client = sdk(key)
    begun = client.responses.create(model=model, input="x", max_output_tokens=40, background=True)
    site.kill_gateway()
    site.start_gateway()
    done = ended(client, begun.id)
    assert (done.status, len(done.output_text)) == ("incomplete", 40)


def test_a_tool_is_called_and_answered(client, engine_model):
    given: Any = {
        "model": engine_model,
        "input": [{"role": "user", "content": "hello"}],
        "tools": [TOOL],
        "max_output_tokens": 300,
        "extra_body": {"seed": 1},
    }
    forced = given | {"tool_choice": {"type": "function", "name": "water_level"}}
    answer = client.responses.create(**forced)
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "water_level", "completed")
    assert json.loads(call.arguments).keys() == {"city", "cm"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [forced["tool_choice"]]}
    other = {"type": "function", "name": "bye", "parameters": {"type": "object", "properties": {}}}
    among = client.responses.create(**forced | {"tools": [other, TOOL], "tool_choice": allowed})
    assert [call.name for call in among.output] == ["water_level"] * len(among.output)
    assert among.tool_choice.to_dict() == allowed
    pieces, last = "", None
    for last in client.responses.create(**forced, stream=True):
        pieces += last.delta if last.type == "response.function_call_arguments.delta" else ""
    assert last.type == "response.completed"
    assert pieces == last.response.output[0].arguments == call.arguments

    with client.responses.stream(**forced) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output[0].arguments == call.arguments

    said = {"type": "function_call_output", "call_id": call.call_id, "output": "12 cm"}
    short = given | {"max_output_tokens": 3}
    in_full = client.responses.create(**short | {"input": [*given["input"], call.to_dict(), said]})
    goes_on = client.responses.create(**short | {"input": [said]}, previous_response_id=answer.id)
    assert goes_on.usage.input_tokens == in_full.usage.input_tokens


def test_a_schema_is_followed(client, engine_model):
    answer = client.responses.create(
        model=engine_model,
        input="hello",
        max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "level", "schema": TOOL["parameters"]}},
    )
    assert json.loads(answer.output_text).keys() == {"city", "cm"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"metadata": {"n": 1}}, "metadata"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"temperature": 3}, "temperature"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "stream": True}, "stream"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
    ],
)
def test_the_field_is_named(http, model, change, param):
    response = http.post("responses", json={"model": model, "input": "x"} | change)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith(param)
