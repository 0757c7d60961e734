"""The unmodified `anthropic` SDK against the running product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tenants.principal import LimitMetric
from tests.factories import make_key, make_tenant, set_limit

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "water_level",
    "description": "The level at a weir.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "cm": {"type": "boolean"}},
        "required": ["city", "cm"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(site) -> Iterator[Callable[[str], Anthropic]]:
    clients: list[Anthropic] = []

    def connect(secret: str, **options: Any) -> Anthropic:
        options = {"api_key": secret, "max_retries": 0, "timeout": 60} | options
        clients.append(Anthropic(base_url=site.url, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_whole(claude, key, model):
    answer = claude(key).messages.create(
        model=model, max_tokens=7, messages=HELLO, system="Be brief.", extra_body={"seed": 1}
    )
    assert answer.id.startswith("msg-")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    (block,) = answer.content
    assert (block.type, len(block.text)) == ("text", 7)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 7
    counted = claude(key).messages.count_tokens(model=model, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens


def test_models(claude, key, model):
    client = claude(key)
    page = client.models.list()
    found = {each.id: each for each in page}
    assert not page.has_more
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
    one = client.models.retrieve(model)
    assert one == found[model]
    assert (one.type, one.display_name, one.lifecycle) == ("model", model, "active")
    assert one.created_at is not None
    assert one.max_input_tokens == 8192


def test_streamed_says_the_same(claude, key, model):
    client = claude(key)
    given: Any = {"model": model, "max_tokens": 9, "messages": HELLO, "extra_body": {"seed": 5}}
    whole = client.messages.create(**given)
    events = list(client.messages.create(**given, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    assert events[-2].usage.output_tokens == 9
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)


async def test_async_and_a_bearer_token(site, key, model):
    async with AsyncAnthropic(base_url=site.url, auth_token=key, timeout=60) as client:
        answer = await client.messages.create(model=model, max_tokens=3, messages=HELLO)
        assert len(answer.content[0].text) == 3
        async with client.messages.stream(model=model, max_tokens=3, messages=HELLO) as stream:
            assert len("".join([text async for text in stream.text_stream])) == 3


def test_blocks_and_roles_read_as_strings_do(claude, key, model):
    client = claude(key)
    text = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    plain = client.messages.count_tokens(model=model, system="A", messages=HELLO)
    blocks = client.messages.count_tokens(
        model=model,
        system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [text]}],
    )
    assert plain == blocks


def test_a_stop_sequence(claude, key, engine_model):
    client = claude(key)
    given: Any = {"model": engine_model, "max_tokens": 40, "messages": HELLO, "extra_body": {"seed": 2}}
    text = client.messages.create(**given).content[0].text
    stop = text[3:5]
    answer = client.messages.create(**given, stop_sequences=["\u2603", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)] if text.index(stop) else answer.content == []


def test_a_tool_is_called_and_answered(claude, key, engine_model):
    client = claude(key)
    given: Any = {
        "model": engine_model,
        "max_tokens": 300,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "water_level"},
        "extra_body": {"seed": 1},
    }
    answer = client.messages.create(**given)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert (call.type, call.name, call.input.keys()) == ("tool_use", "water_level", {"city", "cm"})
    with client.messages.stream(**given) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)

    conversation = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "See."}, call.to_dict()]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    after = client.messages.create(model=engine_model, max_tokens=3, messages=conversation, tools=[TOOL])
    assert after.usage.output_tokens <= 3
    assert (
        after.usage.input_tokens + after.usage.cache_read_input_tokens
        == client.messages.count_tokens(model=engine_model, messages=conversation, tools=[TOOL]).input_tokens
    )


def test_a_schema_is_followed(claude, key, engine_model):
    schema = TOOL["input_schema"]
    answer = claude(key).messages.create(
        model=engine_model,
        max_tokens=300,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert httpx.Response(200, text=answer.content[0].text).json().keys() == {"city", "cm"}


def test_errors_become_the_sdks_exceptions(claude, key, model):
    client = claude(key)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nope", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        claude("wr_live_nope").messages.create(model=model, max_tokens=1, messages=HELLO)
    for change, named in [
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": list("abcde")}, "stop_sequences"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"extra_body": {"tempurature": 1}}, "tempurature"),
    ]:
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**{"model": model, "max_tokens": 1, "messages": HELLO} | change)
        body = bad.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert named in body["error"]["message"]
        assert body["request_id"] == bad.value.response.headers["x-request-id"]


def test_its_errors_on_other_routes_too(site, key):
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    for method, path, status in [
        ("GET", "messages", 405),
        ("POST", "messages/batches", 404),
        ("GET", "nothing", 404),
    ]:
        response = httpx.request(method, f"{site.url}/v1/{path}", headers=headers, timeout=60)
        assert (response.status_code, response.json()["type"]) == (status, "error")


@pytest.mark.django_db(transaction=True)
def test_a_limit_is_a_rate_limit_error(claude, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1, period_s=3600)
    client = claude(make_key(tenant).secret)
    client.messages.create(model=model, max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.RateLimitError) as limited:
        client.messages.create(model=model, max_tokens=1, messages=HELLO)
    assert limited.value.body["error"]["type"] == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) > 0
