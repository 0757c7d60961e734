"""A real gateway that is told to stop while it answers: what can end ends, the rest is told why it breaks off, and
goes on where it can be read on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.site import ROOT, TOKENS_PER_S, wait_until
from tests.inference.api.test_resume import events, resumed, text_of
from weir.servers import SERVERS, server_arguments

DRAIN_S = 4
SHORT = TOKENS_PER_S
"""Tokens: it ends in time."""
LONG = 400


@pytest.fixture(params=SERVERS)
def stopping(request: pytest.FixtureRequest, site) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A second gateway of the site, and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = site.env | {"WEIR_GATEWAY_DRAIN_S": str(DRAIN_S)}
    argv = [sys.executable, *server_arguments(request.param, host="127.0.0.1", port=port)]
    with site.log.open("ab") as log:
        gateway = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log)
    url = f"http://localhost:{port}/v1/"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}models", timeout=10).status_code == 401
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, "the second gateway", site.log)
        yield gateway, url
    finally:
        gateway.kill()
        gateway.wait(10)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(120)
def test_what_is_open_ends_or_is_told_why_it_does_not(stopping, http, key, model):
    gateway, url = stopping
    chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "seed": 7}
    bearer = {"Authorization": f"Bearer {key}"}
    has_begun = [threading.Event() for _ in range(3)]

    def streamed(path: str, tokens: int, begun: threading.Event) -> list[Any]:
        parts = []
        body = {**chat, "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", url + path, json=body, headers=bearer, timeout=60) as response:
            for part in events(response):
                parts.append(part)
                begun.set()
        return parts

    def whole() -> httpx.Response:
        return httpx.post(
            f"{url}chat/completions", json={**chat, "max_tokens": LONG}, headers=bearer, timeout=60
        )

    with ThreadPoolExecutor(4) as threads:
        plain = threads.submit(whole)
        long, foreign = (
            threads.submit(streamed, path, LONG, begun)
            for path, begun in zip(("chat/completions", "messages"), has_begun, strict=False)
        )
        for begun in has_begun[:2]:
            assert begun.wait(30)
        short = threads.submit(streamed, "chat/completions", SHORT, has_begun[2])
        assert has_begun[2].wait(30)
        gateway.send_signal(signal.SIGTERM)
        assert short.result(60)[-1][1] == "[DONE]"
        *first, (_, failure) = long.result(60)
        *_, (_, in_other_words) = foreign.result(60)
        refused = plain.result(60)
    gateway.wait(30)

    assert (failure["error"]["code"], failure["error"]["retry_after"]) == ("gateway_stopping", 1)
    assert (in_other_words["type"], in_other_words["error"]["code"]) == ("error", "gateway_stopping")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_stopping")
    assert refused.headers["Retry-After"] == "1"

    # It goes on: another gateway has the rest of it.
    last_id, last = first[-1]
    begun = text_of(first)
    assert 0 < len(begun) < LONG
    eventually(lambda: http.get(f"requests/{last['id']}").json()["completion_tokens"] > len(begun))
    rest = resumed(http, last["id"], last_id)
    assert rest[-1][1] == "[DONE]"
    assert len(begun + text_of(rest)) == LONG


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
