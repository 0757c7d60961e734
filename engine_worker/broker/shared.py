"""One connection for all the scripts that an event loop calls at once.

What is called in one turn of the loop goes out in one write, and replies come back in order: a call costs no
connection of its own, no lock and hardly a system call. For scripts only, which are short: a call that waits at the
server would hold up all others, and has a connection to itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

_PACK: Final[Any] = pack_command
"""By hiredis, as redis-py's synchronous client does it: a tenth of the time that its asynchronous one takes."""
_ATTEMPTS: Final = 2
"""A connection that turns out to be dead (the server restarted) is replaced once: every script may be repeated."""

_PATIENCE: Final = 0.9
"""Who is cancelled after this part of the time-out, in which nothing was heard, was not answered in time."""


class SharedConnection:
    """`await shared.evalsha(sha1, 1, key, argument)`, as of redis-py's client; for one server, not for a cluster.

    Callers bound their calls by `timeout_s`. One that is cancelled leaves the connection to the others: its reply is
    read and forgotten. But with one that had waited for its time the connection goes, since a server that does not
    answer one call answers none of those after it.

    Raises redis.exceptions.RedisError.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # A pool only as the parser of the URL and the factory of its kind of connection.
        self._pool: Any = ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._line: _Line | None = None
        self._connecting: asyncio.Task[_Line] | None = None

    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: str | bytes | int) -> Any:
        return await self._call("EVALSHA", sha, numkeys, *keys_and_args)

    async def eval(self, script: str, numkeys: int, *keys_and_args: str | bytes | int) -> Any:
        return await self._call("EVAL", script, numkeys, *keys_and_args)

    async def blpop(self, keys: Sequence[str], timeout_s: float) -> Any:
        """On a connection that has no other callers, because this one waits at the server. Who is cancelled takes the
        connection along: what came for nobody would be lost."""
        try:
            return await self._call("BLPOP", *keys, timeout_s)
        except asyncio.CancelledError:
            if self._line is not None:
                self._line.give_up(RedisConnectionError("who waited has left"))
            raise

    async def aclose(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._line is not None:
            await self._line.aclose()
            self._line = None

    async def _call(self, *command: str | bytes | float) -> Any:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        for attempt in range(_ATTEMPTS):
            line = self._line
            if line is None or line.is_broken:
                line = await self._connected()
            try:
                return await line.call(command)
            except RedisConnectionError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            except asyncio.CancelledError:
                # A slow caller on a busy loop must not take a connection that answers others.
                if loop.time() - max(began_at, line.heard_at) >= _PATIENCE * self._timeout_s:
                    line.give_up(RedisConnectionError("another call was not answered in time"))
                raise

    async def _connected(self) -> _Line:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="shared-connect")
            self._connecting.add_done_callback(_seen)
        # Shielded: a caller that leaves must not stop it for the others.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Line:
        try:
            if self._line is not None:
                await self._line.aclose()
            connection: Connection = self._pool.make_connection()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await cast(Any, connection).connect()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._line = _Line(connection)
            return self._line
        except (OSError, TimeoutError) as error:
            raise RedisConnectionError(f"can't connect: {error}") from error
        finally:
            self._connecting = None


def _seen(task: asyncio.Task[_Line]) -> None:
    # Who waits for it hears the failure; all of them may have left.
    if not task.cancelled():
        task.exception()


class _Line:
    """A connection, what was sent over it, and whoever waits for the replies."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._has_work = asyncio.Event()
        self.is_broken = False
        self.heard_at = asyncio.get_running_loop().time()
        self._tasks = (
            asyncio.create_task(self._write(), name="shared-write"),
            asyncio.create_task(self._read(), name="shared-read"),
        )

    async def call(self, command: tuple[str | bytes | float, ...]) -> Any:
        if self.is_broken:
            raise RedisConnectionError("the connection was lost")
        reply = asyncio.get_running_loop().create_future()
        self._outgoing.append(_PACK(command))
        self._waiting.append(reply)
        self._has_work.set()
        return await reply

    def give_up(self, error: RedisError) -> None:
        """Nothing more comes of it: everybody who waits hears `error`."""
        self.is_broken = True
        while self._waiting:
            if not (reply := self._waiting.popleft()).done():
                reply.set_exception(error)
                reply.exception()  # seen: whoever waits hears it, and may have left in this very turn
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        self.give_up(RedisConnectionError("closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.disconnect(nowait=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                outgoing, self._outgoing = self._outgoing, []
                await self._connection.send_packed_command(outgoing, check_health=False)
        except (RedisError, OSError) as error:
            self._lost(error)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    reply = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
                except ResponseError as error:
                    self._answer(error=error)
                else:
                    self._answer(reply)
        except (RedisError, OSError) as error:
            self._lost(error)

    def _answer(self, reply: Any = None, *, error: ResponseError | None = None) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        waiting = self._waiting.popleft()
        if waiting.done():
            return  # its caller has left
        if error is None:
            waiting.set_result(reply)
        else:
            waiting.set_exception(error)

    def _lost(self, error: Exception) -> None:
        self.give_up(RedisConnectionError(f"the connection was lost: {error}"))
