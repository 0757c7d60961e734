"""The floor: a bare ASGI application on the same server, one script in the same Redis a request, the same answers.

    python -m benchmarks.gateway.floor PORT     (Redis from REDIS_URL)

No key, no check, no template, no queue, no worker: below this nothing can get that answers in Python by way of Redis.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.gateway.upstream import bodies
from engine_worker.broker.shared import SharedConnection
from weir.uvicorn_server import serve

CHUNKS = 20
_PLAIN, _EVENTS = bodies(CHUNKS)
_shared: list[SharedConnection] = []


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = (await receive()).get("body", b"")
    if not _shared:
        _shared.append(SharedConnection(os.environ["REDIS_URL"], timeout_s=10))
    await _shared[0].eval("return 1", 1, "weir:{floor}")
    is_streamed = b'"stream": true' in body
    kind = b"text/event-stream" if is_streamed else b"application/json"
    headers = [(b"content-type", kind)]
    if not is_streamed:
        headers.append((b"content-length", str(len(_PLAIN)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in _EVENTS if is_streamed else ():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"" if is_streamed else _PLAIN})


if __name__ == "__main__":
    serve("benchmarks.gateway.floor:application", host="127.0.0.1", port=int(sys.argv[1]))
