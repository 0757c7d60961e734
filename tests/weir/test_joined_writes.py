"""An answer's headers and its body are one write; what is large is not held back, and nothing changes its order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from weir.uvicorn_server import SMALL, JoiningTransport


class Counted:
    """A real transport, and what was written to it."""

    def __init__(self, within: asyncio.Transport) -> None:
        self._within = within
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)

    def write(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self._within.write(data)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[JoiningTransport, Counted, asyncio.StreamReader]]:
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=far)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    counted = Counted(transport)
    yield JoiningTransport(cast(asyncio.Transport, counted)), counted, reader
    transport.abort()
    writer.transport.abort()
    await asyncio.sleep(0)


async def read(reader: asyncio.StreamReader, size: int) -> bytes:
    async with asyncio.timeout(20):
        return await reader.readexactly(size)


async def test_what_is_written_in_one_turn_is_one_write(ends):
    joining, counted, reader = ends
    joining.write(b"head")
    joining.write(b"body")
    assert joining.get_write_buffer_size() == 8
    assert await read(reader, 8) == b"headbody"
    joining.write(b"next")
    assert await read(reader, 4) == b"next"
    assert counted.sizes == [8, 4]
    assert joining.get_write_buffer_size() == 0


async def test_what_is_large_goes_at_once_behind_what_came_before(ends):
    joining, counted, reader = ends
    joining.write(b"head")
    joining.write(b"x" * (SMALL + 1))
    assert counted.sizes == [4, SMALL + 1]
    joining.write(b"tail")
    assert await read(reader, SMALL + 9) == b"head" + b"x" * (SMALL + 1) + b"tail"


async def test_many_small_pieces_are_not_gathered_without_end(ends):
    joining, counted, reader = ends
    for _ in range(100):
        joining.write(b"x" * 1024)
        assert joining.get_write_buffer_size() - counted.get_write_buffer_size() <= SMALL
    assert await read(reader, 100 * 1024) == b"x" * 100 * 1024


async def test_closing_sends_what_is_left_and_aborting_does_not_fail(ends):
    joining, counted, reader = ends
    joining.write(b"last words")
    joining.close()
    assert await read(reader, 10) == b"last words"
    assert await reader.read() == b""
    joining.write(b"too late")
    joining.abort()
    await asyncio.sleep(0)
    assert counted.sizes == [10]


async def test_a_flush_waits_for_no_turn(ends):
    joining, counted, reader = ends
    joining.write(b"head")
    joining.write(b"body")
    joining.flush()
    assert counted.sizes == [8]
    assert await read(reader, 8) == b"headbody"
    assert counted.sizes == [8]
