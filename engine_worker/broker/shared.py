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
"""Of the time-out: when one call has had all of it, and nothing was heard for this part, the server answers nobody."""


class SharedConnection:
    """`await shared.evalsha(sha1, 1, key, argument)`, as of redis-py's client; for one server, not for a cluster.

    Each call of a script ends within `timeout_s`: one timer watches the oldest that waits, where a time-out around
    each would cost as much as the call. Who is cancelled leaves the connection to the others: its reply is read and
    forgotten. But with one that had waited for its time the connection goes, since a server that does not answer one
    call answers none of those after it.

    Raises TimeoutError, redis.exceptions.RedisError.
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
        """On a connection that has no other callers, because this one waits at the server; its caller bounds it. Who is
        cancelled takes the connection along: what came for nobody would be lost."""
        try:
            return await self._asked(("BLPOP", *keys, timeout_s), None)
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
        return await self._asked(command, self._timeout_s)

    async def _asked(self, command: tuple[str | bytes | float, ...], within_s: float | None) -> Any:
        ends_at = None if within_s is None else asyncio.get_running_loop().time() + within_s
        line, attempts = self._line, _ATTEMPTS
        if line is not None and not line.is_broken:
            try:
                return await line.call(command, within_s)
            except RedisConnectionError:
                attempts -= 1
        async with asyncio.timeout_at(ends_at):
            return await self._asked_anew(command, within_s, attempts)

    async def _asked_anew(
        self, command: tuple[str | bytes | float, ...], within_s: float | None, attempts: int
    ) -> Any:
        while True:
            attempts -= 1
            line = self._line
            if line is None or line.is_broken:
                line = await self._connected()
            try:
                return await line.call(command, within_s)
            except RedisConnectionError:
                if not attempts:
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
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        """And when they asked; nobody watches the time of one that asked at infinity."""
        self._watch: asyncio.TimerHandle | None = None
        super().__init__(connection)

    def call(self, command: tuple[str | bytes | float, ...], within_s: float | None) -> asyncio.Future[Any]:
        if self.is_broken:
            raise RedisConnectionError("the connection was lost")
        reply: asyncio.Future[Any] = self._loop.create_future()
        self.send(command)
        if within_s is None:
            self._waiting.append((reply, float("inf")))
            return reply
        self._waiting.append((reply, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(within_s, self._look, within_s)
        return reply

    def _look(self, within_s: float) -> None:
        self._watch = None
        now = self._loop.time()
        is_late, next_at = False, float("inf")
        for reply, asked_at in self._waiting:
            if asked_at + within_s > now:
                next_at = asked_at + within_s
                break
            is_late = True
            if not reply.done():
                reply.set_exception(TimeoutError())
        # A call that was slow, or whose caller was on a busy loop, must not take a connection that answers others.
        if is_late and now - self.heard_at >= _PATIENCE * within_s:
            self.give_up(RedisConnectionError("another call was not answered in time"))
        elif next_at < float("inf"):
            self._watch = self._loop.call_at(next_at, self._look, within_s)

    def heard(self, reply: Any) -> None:
        waiting, _ = self._waiting.popleft()
        if waiting.done():
            return  # its caller has left
        if isinstance(reply, RedisError):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def ended(self, error: RedisError) -> None:
        """Everybody who waits hears it."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            reply, _ = self._waiting.popleft()
            if not reply.done():
                reply.set_exception(error if isinstance(error, RedisConnectionError) else _lost(error))
                reply.exception()  # seen: whoever waits hears it, and may have left in this very turn


def _lost(error: Exception) -> RedisConnectionError:
    return RedisConnectionError(f"the connection was lost: {error}")
