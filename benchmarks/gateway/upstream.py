"""The double for other gateways: an OpenAI-speaking server that answers at once, a stream in so many chunks.

    python -m benchmarks.gateway.upstream PORT CHUNKS

What it says is made beforehand: it costs its callers little more than the socket.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"


def bodies(chunks: int) -> tuple[bytes, list[bytes]]:
    """Of the plain answer, and the events of the streamed one."""
    base = {"id": "chatcmpl-0199c0de", "created": 1_760_000_000, "model": "bench"}
    body = json.dumps(
        base
        | {
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " token" * chunks},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 40, "completion_tokens": chunks, "total_tokens": 40 + chunks},
        }
    )

    def delta(content: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": content, "finish_reason": finish}
        chunk = json.dumps(base | {"object": "chat.completion.chunk", "choices": [choice]})
        return f"data: {chunk}\n\n".encode()

    events = [delta({"role": "assistant", "content": ""})]
    events += [delta({"content": " token"}) for _ in range(chunks)]
    return body.encode(), [*events, delta({}, "stop"), b"data: [DONE]\n\n"]


def answers(chunks: int) -> tuple[bytes, list[bytes]]:
    """The plain answer, and the pieces of the streamed one, as they are sent."""
    body, events = bodies(chunks)
    plain = _HEAD.format(kind="application/json", length=f"Content-Length: {len(body)}").encode() + body
    head = _HEAD.format(kind="text/event-stream", length="Transfer-Encoding: chunked").encode()
    pieces = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in events]
    return plain, [head, *pieces, b"0\r\n\r\n"]


class Server(asyncio.Protocol):
    def __init__(self, plain: bytes, pieces: list[bytes]) -> None:
        self._plain = plain
        self._pieces = pieces
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
            body, rest = self._got[end + 4 :][:length], self._got[end + 4 + length :]
            if len(body) < length:
                return
            self._got = rest
            if b'"stream": true' in body or b'"stream":true' in body:
                for piece in self._pieces:
                    self._transport.write(piece)
            else:
                self._transport.write(self._plain)


async def serve(port: int, chunks: int) -> None:
    plain, pieces = answers(chunks)
    server = await asyncio.get_running_loop().create_server(lambda: Server(plain, pieces), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
