"""A stream that broke off is read on where it broke off, on any gateway, until its log is gone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings

from engine_worker.broker import keys
from inference.api.sse import Position, Stage
from tests.factories import make_key, make_tenant, make_tier

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 7, "stream": True}


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """(id, data) of each event, the id empty where it has none; data of the last is `[DONE]`."""
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            text = line[6:]
            yield event_id, text if text == "[DONE]" else json.loads(text)
            event_id = ""


def text_of(parts: list[tuple[str, Any]]) -> str:
    choices = [choice for _, data in parts if data != "[DONE]" for choice in data["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    )


def read(
    http: httpx.Client, path: str, body: dict[str, Any], count: int | None = None, **headers: str
) -> list[Any]:
    """The first `count` events with an id, or all."""
    parts = []
    with http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for part in events(response):
            parts.append(part)
            if count is not None and len(parts) >= count:
                break
    return parts


def resumed(http: httpx.Client, request_id: str, last_id: str, query: str = "") -> list[Any]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with http.stream("GET", f"requests/{request_id}/stream{query}", headers=headers) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))


@pytest.fixture(params=["chat/completions", "completions"])
def route(request: pytest.FixtureRequest, model: str) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {**BODY, "model": model}
    if request.param == "completions":
        del body["messages"]
        body["prompt"] = "hello"
    return request.param, body


@pytest.mark.parametrize("count", [1, 2, 17])
def test_after_a_dropped_connection_the_rest_comes_and_nothing_twice(http, route, count):
    path, body = route
    whole = text_of(read(http, path, body))
    assert len(whole) == 60
    first = read(http, path, body, count, **{"x-weir-resume-grace": "20"})
    request_id, last_id = first[-1][1]["id"], first[-1][0]
    rest = resumed(http, request_id, last_id)
    assert text_of(first) + text_of(rest) == whole
    assert rest[-1][1] == "[DONE]"
    # And again, now that it has ended: from the start, from the middle, from the end.
    assert text_of(resumed(http, request_id, "")) == whole
    assert text_of(first) + text_of(resumed(http, request_id, last_id)) == whole
    assert resumed(http, request_id, rest[-2][0]) == rest[-1:]
    status = http.get(f"requests/{request_id}").json()
    assert (status["status"], status["finish_reason"]) == ("finished", "length")
    assert (status["completion_tokens"], status["attempts"], status["position"]) == (60, 1, None)


@pytest.mark.parametrize("tier", ["default", "flex"])
def test_a_resumed_event_is_the_one_that_was_missed(http, model, tier):
    """Field for field, whatever a client reads of it."""
    make_tier(settings.BATCH_TIER)
    body = {**BODY, "model": model, "service_tier": tier, "stream_options": {"include_usage": True}}
    missed = read(http, "chat/completions", body)
    ids = [event_id for event_id, _ in missed]
    request_id = missed[0][1]["id"]
    rest = resumed(http, request_id, ids[20], "?include_usage=true")
    assert rest == missed[21:]
    assert {data["service_tier"] for _, data in rest if data != "[DONE]"} == {tier}


def test_after_a_killed_gateway_the_rest_comes_from_another(site, http, route):
    path, body = route
    whole = text_of(read(http, path, body))
    first: list[Any] = []
    with http.stream("POST", path, json=body) as response, contextlib.suppress(httpx.TransportError):
        for part in events(response):
            first.append(part)
            if len(first) == 12:
                site.kill_gateway()
    assert first[-1][1] != "[DONE]"
    site.start_gateway()
    rest = resumed(http, first[-1][1]["id"], first[-1][0], "?include_usage=true")
    assert text_of(first) + text_of(rest) == whole
    assert rest[-2][1]["usage"]["completion_tokens"] == 60


def test_without_a_word_of_coming_back_a_dropped_stream_is_cancelled(http, route):
    path, body = route
    first = read(http, path, body, 3)
    request_id = first[-1][1]["id"]
    deadline = time.monotonic() + 20
    while http.get(f"requests/{request_id}").json()["status"] != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert http.get(f"requests/{request_id}").json()["finish_reason"] == "cancelled"


def test_nobody_comes_back_in_time(http, route):
    path, body = route
    request_id = read(http, path, {**body, "max_tokens": 4000}, 3, **{"x-weir-resume-grace": "1"})[-1][1][
        "id"
    ]
    time.sleep(0.5)
    assert http.get(f"requests/{request_id}").json()["status"] == "running"
    deadline = time.monotonic() + 20
    while http.get(f"requests/{request_id}").json()["status"] != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_another_tenants_request_is_as_unknown_as_none(site, http, route):
    path, body = route
    request_id = read(http, path, body)[0][1]["id"]
    other = {"Authorization": f"Bearer {make_key(make_tenant()).secret}"}
    for named, headers in ((request_id, other), ("chatcmpl-none", {})):
        for suffix in ("", "/stream"):
            answer = http.get(f"requests/{named}{suffix}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_beyond_the_end_there_is_nothing_to_read(http, route):
    path, body = route
    request_id = read(http, path, {**body, "max_tokens": 3})[0][1]["id"]
    assert text_of(resumed(http, request_id, "3.2")) == ""
    late = http.get(f"requests/{request_id}/stream", headers={"Last-Event-ID": "4"})
    assert (late.status_code, late.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "ends after token 3" in late.json()["error"]["message"]
    # Of one that still runs only its end can tell.
    first = read(http, path, {**body, "max_tokens": 20}, 3, **{"x-weir-resume-grace": "20"})
    late = http.get(f"requests/{first[-1][1]['id']}/stream", headers={"Last-Event-ID": "21"})
    assert '"param":"Last-Event-ID"' in late.text
    assert "ends after token 20" in late.text


def test_a_request_is_cancelled_by_its_id(http, route):
    path, body = route
    first = read(http, path, {**body, "max_tokens": 4000}, 3, **{"x-weir-resume-grace": "60"})
    request_id = first[-1][1]["id"]
    assert http.post(f"requests/{request_id}/cancel").json()["id"] == request_id
    *_, (_, last) = resumed(http, request_id, "")
    assert last["error"]["code"] == "request_cancelled"
    for answer in (http.get(f"requests/{request_id}"), http.post(f"requests/{request_id}/cancel")):
        assert (answer.json()["status"], answer.json()["finish_reason"]) == ("finished", "cancelled")


def test_who_waits_for_what_another_cancels_is_not_told_to_try_again(http, route, model):
    path, body = route

    def known(server: redis.Redis) -> set[bytes]:
        return set(server.scan_iter(keys.model_prefix(model) + "req:*", count=10_000))

    with redis.Redis.from_url(settings.REDIS_URL) as server, ThreadPoolExecutor(1) as threads:
        before = known(server)
        waiting = threads.submit(http.post, path, json={**body, "max_tokens": 4000, "stream": False})
        while not (new := known(server) - before):
            assert not waiting.done(), waiting.result()
        request_id = new.pop().decode().rpartition(":")[2]
        assert http.post(f"requests/{request_id}/cancel").status_code == 200
        answer = waiting.result(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "request_cancelled")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "headers", [{"Last-Event-ID": "x"}, {"Last-Event-ID": "-1"}, {"x-weir-resume-grace": "soon"}]
)
def test_what_makes_no_sense_is_refused(http, route, headers):
    path, body = route
    request_id = read(http, path, {**body, "max_tokens": 1})[0][1]["id"]
    assert http.get(f"requests/{request_id}/stream", headers=headers).status_code == 400


def test_positions_are_written_as_they_are_read():
    for position in (Position(), Position(12), *(Position(12, stage) for stage in Stage)):
        assert Position.parse(str(position)) == position
    for text in ("3.", "3.0", "3.4", "-1", "1e3", "3.1.1"):
        with pytest.raises(ValueError, match="no event id"):
            Position.parse(text)


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("wants", ["", "logprobs"])
def test_after_each_event_exactly_the_others_come(http, route, wants, max_tokens):
    """Also the one that says who speaks, the one with the end, and the usage."""
    path, body = route
    body = {**body, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    query = "?include_usage=true"
    if wants:
        body["logprobs"] = True if path.startswith("chat") else 0
        query += "&logprobs=true"
    *whole, done = read(http, path, body)
    assert done[1] == "[DONE]"
    ids = [event_id for event_id, _ in whole]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    request_id = whole[0][1]["id"]
    last = f"{max_tokens}"
    assert ids[-2:] == [f"{last}.2", f"{last}.3"]

    def told(parts: list[Any]) -> list[Any]:
        return [(event_id, {**data, "service_tier": None}) for event_id, data in parts]

    for place, event_id in enumerate(ids, start=1):
        *rest, done = resumed(http, request_id, event_id, query)
        assert done[1] == "[DONE]"
        assert told(rest) == told(whole[place:])
    assert told(resumed(http, request_id, "", query)[:-1]) == told(whole)
