"""One connection for all the scripts that an event loop calls at once.

What is called in one turn of the loop goes out in two writes at most, and replies come back in order: a call costs no
connection of its own, no lock and hardly a system call. For scripts only, which are short: a call that waits at the
server would hold up all others, and has a connection to itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from engine_worker.broker.line import Line

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
        self._line: _Calls | None = None
        self._connecting: asyncio.Task[_Calls] | None = None

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

    async def _connected(self) -> _Calls:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="shared-connect")
            self._connecting.add_done_callback(_seen)
        # Shielded: a caller that leaves must not stop it for the others.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Calls:
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
            self._line = _Calls(connection)
            return self._line
        except (OSError, TimeoutError) as error:
            raise RedisConnectionError(f"can't connect: {error}") from error
        finally:
            self._connecting = None


def _seen(task: asyncio.Task[_Calls]) -> None:
    # Who waits for it hears the failure; all of them may have left.
    if not task.cancelled():
        task.exception()


class _Calls(Line):
    """Whoever waits for replies, in the order in which they asked."""

    def __init__(self, connection: Connection) -> None:
        self._waiting: deque[asyncio.Future[Any]] = deque()
        super().__init__(connection)

    def call(self, command: tuple[str | bytes | float, ...]) -> asyncio.Future[Any]:
        if self.is_broken:
            raise RedisConnectionError("the connection was lost")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(command)
        self._waiting.append(reply)
        return reply

    def heard(self, reply: Any) -> None:
        waiting = self._waiting.popleft()
        if waiting.done():
            return  # its caller has left
        if isinstance(reply, RedisError):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def ended(self, error: RedisError) -> None:
        """Everybody who waits hears it."""
        while self._waiting:
            if not (reply := self._waiting.popleft()).done():
                reply.set_exception(error if isinstance(error, RedisConnectionError) else _lost(error))
                reply.exception()  # seen: whoever waits hears it, and may have left in this very turn


def _lost(error: Exception) -> RedisConnectionError:
    return RedisConnectionError(f"the connection was lost: {error}")
