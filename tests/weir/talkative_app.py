"""An ASGI application that says much, by HTTP and by websocket, and knows who left before the end."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

PIECE = b"x" * 32_768
PIECES = 1024
"""32 MiB in all: far beyond what the kernel keeps for a connection."""
left: list[str] = []
sent: dict[str, int] = {}


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["path"] == "/state":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        body = json.dumps({"left": left, "sent": sent, "peak_kib": peak}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        return
    if scope["path"] == "/upload":
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})
        return
    if scope["path"] == "/begun":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await receive()  # the request, or the wish to connect
    name = scope["path"]
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
    talk = asyncio.create_task(_talk(scope["type"], name, send))
    leave = asyncio.create_task(receive())
    await asyncio.wait([talk, leave], return_when=asyncio.FIRST_COMPLETED)
    if not talk.done() or talk.exception() is not None:  # some servers say it by an error of send
        left.append(name)
        talk.cancel()
    leave.cancel()


async def _talk(kind: str, name: str, send: Any) -> None:
    for number in range(PIECES):
        if kind == "websocket":
            await send({"type": "websocket.send", "bytes": PIECE})
        else:
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        sent[name] = number + 1
        await asyncio.sleep(0)
    if kind == "http":
        await send({"type": "http.response.body", "body": b""})
