"""FAULTS 68: whatever a client sends, hostile things included, gateway and worker log neither prompt nor key."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
import websockets

from tests.e2e.site import MODEL, Site

PROMPT = "xyzzy-the-secret-of-the-prompt"


@pytest.mark.parametrize("model", [MODEL, "no-such-model"])
def test_no_prompt_and_no_key_is_in_the_logs(site: Site, key: str, model: str):
    start = site.log.stat().st_size
    chat: dict[str, Any] = {
        "model": model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    bearer = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=site.url, timeout=30) as client:
        seen = [
            client.post("/v1/chat/completions", json=body, headers=headers).status_code
            for body in (
                chat,
                chat | {"stream": True},
                chat | {"temperature": PROMPT},
                chat | {"messages": [{"role": PROMPT, "content": PROMPT}]},
                chat | {"max_tokens": 10**9},
            )
            for headers in (bearer, {"Authorization": f"Bearer {key[:-1]}"}, bearer | {"X-Request-Id": key})
        ]
        seen.append(
            client.post(
                "/v1/completions", json={"model": model, "prompt": PROMPT}, headers=bearer
            ).status_code
        )
        torn = f'{{"model": "{PROMPT}", "messages": ['.encode()
        seen.append(client.post("/v1/chat/completions", content=torn, headers=bearer).status_code)
        seen.append(client.get(f"/v1/models/{PROMPT}?key={key}", headers=bearer).status_code)
        seen.append(client.get(f"/nowhere/{key}/{PROMPT}").status_code)

    async def chat_socket() -> None:
        url = site.url.replace("http", "ws", 1) + f"/ws/chat?key={key}"
        async with asyncio.timeout(20), websockets.connect(url, origin=site.url) as socket:
            await socket.recv()
            with contextlib.suppress(websockets.ConnectionClosed):
                await socket.send(PROMPT)
                await socket.recv()

    asyncio.run(chat_socket())
    assert {400, 401, 404} <= set(seen)
    assert 500 not in seen
    with site.log.open("rb") as log:
        log.seek(start)
        logged = log.read().decode(errors="replace")
    assert PROMPT not in logged
    assert key not in logged
    assert key[-20:] not in logged
