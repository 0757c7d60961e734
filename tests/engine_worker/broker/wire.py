"""A wire between a client and Redis that a test can cut, freeze and mend."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit


class Wire:
    """`async with Wire(redis_url, directory) as wire: GatewayBroker(wire.url)`."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._target = urlsplit(redis_url)
        self._path = directory / "wire.sock"
        self.url = f"unix://{self._path}"
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection breaks; new ones are refused until `mend`."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Nothing passes and nothing breaks, as when a machine vanishes."""
        self._flowing.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self.connections += 1
        if self._target.scheme == "unix":
            far_reader, far_writer = await asyncio.open_unix_connection(self._target.path)
        else:
            far_reader, far_writer = await asyncio.open_connection(
                self._target.hostname, self._target.port or 6379
            )
        ends = (writer, far_writer)
        if self._is_cut:  # meanwhile
            for end in ends:
                end.transport.abort()
            return
        self._writers.update(ends)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink, ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, ends: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    await self._flowing.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()
