"""What clients rely on and no other test asks: headers, names, pages, and the tier that a request goes in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import redis
from django.conf import settings

from engine_worker.broker.worker import OFFER_MS
from tests.factories import make_key, make_tenant, make_tier
from tests.inference.api.test_life import rows_of, worker_of
from weir.load.client import End, Target, open_loop
from weir.load.mix import Ask

pytestmark = pytest.mark.django_db(transaction=True)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "chat/completions"


def test_headers_of_every_answer(http, model):
    asked = {"model": model, "messages": HELLO, "max_tokens": 1}
    answer = http.post(CHAT, json=asked, headers={"X-Request-Id": "mine-1.2_3"})
    assert answer.headers["x-request-id"] == "mine-1.2_3"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    for bad in ("a b", "x" * 65, "é".encode()):
        given = http.post(
            CHAT, json=asked, headers={b"X-Request-Id": bad if isinstance(bad, bytes) else bad.encode()}
        )
        assert given.headers["x-request-id"] not in ("", bad)
    ids = {http.get(path).headers["x-request-id"] for path in ("models", "nowhere", "files/x")}
    assert len(ids) == 3


def test_every_kind_of_message_and_what_changes_nothing(sdk, key, model):
    messages: list[Any] = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "hello", "name": "ann"},
        {"role": "assistant", "content": "hi", "refusal": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "user", "content": [{"type": "text", "text": "bye"}]},
    ]
    answer = sdk(key).chat.completions.create(
        model=model, messages=messages, max_completion_tokens=3, max_tokens=9, user="u", metadata={"a": "b"},
        safety_identifier="s", prompt_cache_key="p", store=False, service_tier="auto", temperature=0,
        stop=["\x00\x00"], frequency_penalty=0.1, presence_penalty=0.1, logit_bias={"97": 1},
        extra_body={"cache_salt": "x", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "priority": 0},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 3, "max_completion_tokens wins over its older name"
    text = "developer: Be brief.\nuser: hello\nassistant: hi\nassistant: no\nassistant: never\nuser: bye\nassistant:"
    assert answer.usage.prompt_tokens == len(text)
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.service_tier == "default"
    assert answer.choices[0].message.refusal is None
    assert abs(answer.created - time.time()) < 600


def test_a_request_may_go_later_and_never_earlier(http, sdk, model):
    for name in ("realtime", "standard", "batch"):
        make_tier(name)
    make_tier("night", rank=7)
    tenant = make_tenant()
    bearer = {"Authorization": f"Bearer {make_key(tenant).secret}"}

    def tier_of(path: str = CHAT, **given: Any) -> str | tuple[int, str]:
        body = {"model": model, "max_tokens": 1} | ({"messages": HELLO} if path == CHAT else {"prompt": "x"})
        answer = http.post(path, json=body | given, headers=bearer)
        if answer.status_code == 200:
            return answer.headers["x-weir-tier"]
        return answer.status_code, answer.json()["error"]["param"]

    assert [tier_of(service_tier=name) for name in ("auto", "default", "standard")] == ["standard"] * 3
    assert [tier_of(service_tier=name) for name in ("flex", "batch", "night")] == ["batch", "batch", "night"]
    assert tier_of(service_tier="priority") == tier_of(service_tier="realtime") == (403, "service_tier")
    assert tier_of(service_tier="none-such") == (400, "service_tier")
    assert [tier_of(priority=number) for number in (0, 1, 2, 99)] == ["standard", "batch", "night", "night"]
    assert tier_of("completions", priority=1) == "batch"
    assert tier_of(priority=-1) == tier_of(priority=1, service_tier="flex") == (400, "priority")
    response = http.post(
        "responses",
        json={"model": model, "input": "x", "max_output_tokens": 1, "service_tier": "flex"},
        headers=bearer,
    )
    assert response.headers["x-weir-tier"] == "batch"
    tiers = {row.tier for row in rows_of(tenant, 12)}
    assert tiers == {"standard", "batch", "night"}


def test_an_answer_says_how_long_it_waited_in_the_queue(http, model):
    messages = {"model": model, "messages": HELLO, "max_tokens": 1}
    asks = {
        CHAT: messages,
        "completions": {"model": model, "prompt": "x", "max_tokens": 1},
        "responses": {"model": model, "input": "x", "max_output_tokens": 1},
        "messages": messages,
    }
    for path, body in asks.items():
        whole = http.post(path, json=body)
        said = int(whole.headers["x-weir-queue-ms"])
        assert http.get(f"requests/{whole.json()['id']}").json()["queue_ms"] == said, path
        streamed = http.post(path, json=body | {"stream": True})
        assert streamed.status_code == 200
        assert int(streamed.headers["x-weir-queue-ms"]) >= 0, "its head waited for the first token"
    several = http.post("completions", json=asks["completions"] | {"prompt": ["x", "y", "z"]})
    of_each = [http.get(f"requests/{several.json()['id']}-{index}").json()["queue_ms"] for index in range(3)]
    assert int(several.headers["x-weir-queue-ms"]) == max(of_each)
    read_again = http.get(f"requests/{http.post(CHAT, json=messages).json()['id']}/stream")
    assert int(read_again.headers["x-weir-queue-ms"]) >= 0


def test_an_answer_says_which_tier_served_it(http, model):
    for name in ("realtime", "standard", "batch"):
        make_tier(name)
    make_tier("night", rank=7)
    bearer = {"Authorization": f"Bearer {make_key(make_tenant()).secret}"}

    def told(**given: Any) -> set[str]:
        body = {"model": model, "messages": HELLO, "max_tokens": 1} | given
        whole = http.post(CHAT, json=body, headers=bearer).json()["service_tier"]
        with http.stream("POST", CHAT, json=body | {"stream": True}, headers=bearer) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
        assert lines
        return {whole} | {json.loads(line.removeprefix("data: "))["service_tier"] for line in lines}

    assert told() == told(service_tier="auto") == told(service_tier="default") == {"default"}
    for name in ("flex", "batch", "night", "standard"):
        assert told(service_tier=name) == {name}
    assert told(priority=2) == {"night"}
    for asked, expected in ((None, "default"), ("flex", "flex"), ("night", "night")):
        body = {"model": model, "input": "x", "max_output_tokens": 1, "service_tier": asked}
        made = http.post("responses", json=body, headers=bearer).json()
        assert made["service_tier"] == expected
        assert http.get(f"responses/{made['id']}", headers=bearer).json()["service_tier"] == expected


def test_lists_are_paged(sdk, model):
    client = sdk(make_key(make_tenant()).secret)
    ids = [client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch").id for _ in range(5)]
    page = client.files.list(limit=2)
    assert [each.id for each in page.data] == ids[:2:-1]
    assert page.has_more
    assert [each.id for each in page] == ids[::-1], "the SDK asks for the pages that follow"
    assert [each.id for each in client.files.list(order="asc", after=ids[1])] == ids[2:]
    expiring = client.files.create(
        file=("a.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert expiring.expires_at == pytest.approx(expiring.created_at + 3600, abs=2)
    for bad in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-none"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.list(**bad)
        assert refused.value.param == next(iter(bad))


def test_who_waits_in_vain_hears_when_to_come_back_by_status_or_within_the_stream(http, site, model):
    """A stream's head comes with its first token, or after ten seconds: until then an error has a status of its own."""

    def key_of(tier: str, max_wait_s: int) -> str:
        tenant = make_tenant(tier=make_tier(tier, rank=50 + max_wait_s, max_wait_s=max_wait_s))
        return make_key(tenant).secret

    hurried, patient = key_of("hurried", 1), key_of("patient", 11)
    asked = {"model": model, "messages": HELLO, "max_tokens": 2, "stream": True}
    with redis.Redis.from_url(settings.REDIS_URL) as server:
        worker = worker_of(server, model).pid
    os.kill(worker, signal.SIGSTOP)
    try:
        time.sleep(
            OFFER_MS / 1000
        )  # until then it may be handed what it can't answer: it holds that as what it claimed
        with ThreadPoolExecutor(2) as threads:
            ask = Ask(at_s=0, prompt="word", output_tokens=2)
            late = threads.submit(lambda: asyncio.run(open_loop(Target(site.url, [patient], model), [ask])))
            soon = threads.submit(http.post, CHAT, json=asked, headers={"Authorization": f"Bearer {hurried}"})
            with http.stream("POST", CHAT, json=asked) as kept:
                lines = kept.iter_lines()
                assert next(lines) == ": keep-alive"
                refused = soon.result(60)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "waited_in_vain")
                assert refused.headers["Retry-After"] == str(refused.json()["error"]["retry_after"])
                (outcome,) = late.result(60)
                assert (outcome.status, outcome.end, outcome.retry_after) == (200, End.REFUSED, True)
                assert "waited_in_vain" in outcome.error
                os.kill(worker, signal.SIGCONT)
                assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    finally:
        os.kill(worker, signal.SIGCONT)
