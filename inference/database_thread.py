"""One thread for what a request, or a task that outlives it, does in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections


class DatabaseThread:
    """`sync_to_async` within runs all in one thread, made when it is needed, whose connection goes back at the end.

    A context of its own even within another's: a task inherits that of the request that began it, and once that has
    ended, nobody would look after the connection that the task opens.
    """

    # Not a generator with a decorator: most requests need no thread, and would pay more for that than for all else.
    async def __aenter__(self) -> None:
        self._context = ThreadSensitiveContext()
        self._token = SyncToAsync.thread_sensitive_context.set(self._context)

    async def __aexit__(self, *_error: object) -> None:
        if self._context in SyncToAsync.context_to_thread_executor:
            await sync_to_async(close_old_connections)()
            SyncToAsync.context_to_thread_executor.pop(self._context).shutdown()
        SyncToAsync.thread_sensitive_context.reset(self._token)


@asynccontextmanager
async def database_thread() -> AsyncIterator[None]:
    """The same, also as a decorator."""
    async with DatabaseThread():
        yield
