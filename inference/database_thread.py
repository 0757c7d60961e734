"""One thread for what a request, or a task that outlives it, does in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import close_old_connections

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DatabaseThread:
    """`sync_to_async` within runs all in one thread, made when it is needed.

    Its connection goes back after each call, and not at the end: a request waits for its tokens longer than ten
    others need the pool, and may wait for a task that needs a connection of its own.

    A context of its own even within another's: a task inherits that of the request that began it, and once that has
    ended, nobody would look after the thread that the task begins.
    """

    # Not a generator with a decorator: most requests need no thread, and would pay more for that than for all else.
    async def __aenter__(self) -> None:
        self._context = ThreadSensitiveContext()
        self._thread = _Thread()
        SyncToAsync.context_to_thread_executor[self._context] = self._thread
        self._token = SyncToAsync.thread_sensitive_context.set(self._context)

    async def __aexit__(self, *_error: object) -> None:
        SyncToAsync.thread_sensitive_context.reset(self._token)
        SyncToAsync.context_to_thread_executor.pop(self._context)
        self._thread.shutdown(wait=False)


class _Thread(Executor):
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "database")
        return self._pool.submit(_and_give_back, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _and_give_back(call: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    try:
        return call(*args, **kwargs)
    finally:
        close_old_connections()


@asynccontextmanager
async def database_thread() -> AsyncIterator[None]:
    """The same, also as a decorator."""
    async with DatabaseThread():
        yield
