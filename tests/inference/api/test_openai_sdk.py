"""The unmodified `openai` SDK, sync and async, against the running product."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI

from tenants.principal import LimitMetric
from tests.factories import make_key, make_tenant, set_limit

HELLO = [{"role": "user", "content": "hello"}]


def test_chat_whole(sdk, key, model):
    answer = sdk(key).chat.completions.create(model=model, messages=HELLO, max_tokens=7, seed=1)

    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.content) == 7
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_streamed_says_the_same(sdk, key, model):
    client = sdk(key)
    whole = client.chat.completions.create(model=model, messages=HELLO, max_tokens=9, seed=5)
    chunks = list(
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=9, seed=5, stream=True)
    )

    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_usage_chunk_comes_when_asked_and_only_then(sdk, key, model):
    """FAULTS 65."""
    chunks = list(
        sdk(key).chat.completions.create(
            model=model, messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    )
    *body, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == 3
    assert all(chunk.usage is None and chunk.choices for chunk in body)


def test_completions_whole_and_streamed(sdk, key, model):
    client = sdk(key)
    whole = client.completions.create(model=model, prompt=["one", "two"], seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [len(choice.text) for choice in whole.choices] == [16, 16]
    assert whole.usage.completion_tokens == 32

    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in client.completions.create(model=model, prompt=["one", "two"], seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]


def test_completions_by_token_ids(sdk, key, model):
    client = sdk(key)
    by_text = client.completions.create(model=model, prompt="abc", seed=3).choices[0].text
    by_ids = client.completions.create(model=model, prompt=[97, 98, 99], seed=3).choices[0].text
    by_lists = client.completions.create(model=model, prompt=[[97, 98, 99], [100]], seed=3).choices
    assert by_ids == by_text == by_lists[0].text


def test_models(sdk, key, model):
    client = sdk(key)
    assert model in [each.id for each in client.models.list()]
    assert client.models.retrieve(model).owned_by == "weir"


def test_errors_become_the_sdks_exceptions(sdk, key, model):
    client = sdk(key)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError) as wrong:
        sdk("wr_live_nope").models.list()
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="x" * 9000)
    assert long.value.code == "context_length_exceeded"
    assert "8192" in long.value.message
    assert "9000" in long.value.message


@pytest.mark.django_db(transaction=True)
def test_rate_limit_headers_and_refusal(sdk, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2)
    client = sdk(make_key(tenant).secret)

    answers = [
        client.chat.completions.with_raw_response.create(model=model, messages=HELLO, max_tokens=1)
        for _ in range(2)
    ]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2", "2"]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0"]
    assert answers[0].headers["x-weir-tier"] == "standard"
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    headers = refused.value.response.headers
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.type == "requests"
    assert 0 < int(headers["retry-after-ms"]) <= 30_000
    assert int(headers["retry-after"]) >= 1
    assert headers["x-weir-limit-scope"] == "tenant"


async def test_async_client_streams_in_parallel(site, key, model):
    async with AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, timeout=60) as client:

        async def one(seed: int, *, stream: bool) -> str:
            if not stream:
                answer = await client.chat.completions.create(
                    model=model, messages=HELLO, max_tokens=12, seed=seed
                )
                return answer.choices[0].message.content or ""
            parts = await client.chat.completions.create(
                model=model, messages=HELLO, max_tokens=12, seed=seed, stream=True
            )
            return "".join([part.choices[0].delta.content or "" async for part in parts])

        streamed = await asyncio.gather(*(one(seed, stream=True) for seed in range(20)))
        whole = await asyncio.gather(*(one(seed, stream=False) for seed in range(20)))
    assert streamed == whole
    assert len(set(streamed)) == 20
