"""The load: a closed loop of keep-alive connections over raw sockets, in a process of its own. Prints JSON.

Parses no more of an answer than tells where it ends, so that what is measured is the server. Its own ceiling is
measured against `upstream`, with the same call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import uvloop

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom to ask, what, and how."""

    port: int
    key: str
    model: str
    streamed: bool
    connections: int
    seconds: float
    events: int
    """Of a stream, at the least: fewer are a failure."""
    max_tokens: int = 20
    headers: dict[str, str] = field(default_factory=dict)
    """Besides."""

    def request(self) -> bytes:
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "Why is the sky blue? Answer in one sentence of plain words."},
            ],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **({"stream": True} if self.streamed else {}),
        }
        content = json.dumps(body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nAccept: */*\r\n{more}Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass(slots=True)
class Result:
    wall_s: float = 0.0
    latency_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """Until the first event of a stream, or the first byte."""


class Connection(asyncio.Protocol):
    def __init__(self, aim: Aim, result: Result, ends_at: float, done: asyncio.Future[None]) -> None:
        self._aim = aim
        self._request = aim.request()
        self._result = result
        self._ends_at = ends_at
        self._done = done
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._got = bytearray()
        self._body_at = 0
        self._length = -1
        self._first_at = 0.0
        self._began_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._body_at and not self._read_head():
            return
        if not self._first_at and (not self._aim.streamed or b"data: " in data):
            self._first_at = time.perf_counter()
        if self._length >= 0:
            if len(self._got) - self._body_at < self._length:
                return
        elif not self._got.endswith(b"0\r\n\r\n"):
            return
        self._answered()

    def _read_head(self) -> bool:
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._body_at = end + 4
        head = bytes(self._got[:end]).lower()
        if b" 200 " not in head.partition(b"\r\n")[0]:
            self._fail(f"answered: {bytes(self._got)!r}")
            return False
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._length = int(head[at + 17 :].partition(b"\r\n")[0])
        return True

    def _answered(self) -> None:
        now = time.perf_counter()
        if self._aim.streamed and (
            self._got.count(b"data: ") < self._aim.events or b"data: [DONE]" not in self._got
        ):
            self._fail(f"a stream broke off: {bytes(self._got[-600:])!r}")
            return
        self._result.latency_ms.append((now - self._began_at) * 1000)
        self._result.first_ms.append((self._first_at - self._began_at) * 1000)
        if now < self._ends_at:
            self._ask()
            return
        assert self._transport is not None
        self._transport.close()
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection lost: {error}")

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(why))


async def load(aim: Aim) -> Result:
    loop = asyncio.get_running_loop()
    result = Result()
    began = time.perf_counter()
    waiting = []
    for _ in range(aim.connections):
        done: asyncio.Future[None] = loop.create_future()
        waiting.append(done)
        await loop.create_connection(
            lambda done=done: Connection(aim, result, began + aim.seconds, done), "127.0.0.1", aim.port
        )
    async with asyncio.timeout(aim.seconds + _TIMEOUT_S):
        await asyncio.gather(*waiting)
    result.wall_s = time.perf_counter() - began
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aim", help="an Aim, as JSON")
    parser.add_argument("result", type=Path, help="the file that the result is written to, as JSON")
    args = parser.parse_args()
    aim = Aim(**json.loads(args.aim))
    try:
        result = uvloop.run(load(aim))
    except (OSError, RuntimeError, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    args.result.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
