"""Whether this gateway can serve: database, Redis, a live worker. Asked by load balancers, so cheap and bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec
import structlog
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse

from engine_worker.broker import BrokerUnavailable
from engine_worker.protocol import StartStage, WorkerStarting, WorkerStatus
from inference.runtime import get_runtime

log = structlog.get_logger(__name__)

OK: Final = "ok"
_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 5
_FRESH_S: Final = 1.0
"""An answer serves everybody who asks within this time: no number of probes makes more than one check a second."""


class Readiness:
    """One per event loop. Of several that ask at once one checks, and the others wait for its answer."""

    def __init__(self) -> None:
        self._checking: asyncio.Task[dict[str, str]] | None = None
        self._asking: asyncio.Task[str] | None = None
        self._checked_at = float("-inf")

    async def checks(self) -> dict[str, str]:
        """What each part says, `ok` or why not, in words that may be public."""
        if self._checking is None or (
            self._checking.done() and time.monotonic() - self._checked_at > _FRESH_S
        ):
            self._checking = asyncio.create_task(self._check(), name="readiness")
        return await asyncio.shield(self._checking)

    async def _check(self) -> dict[str, str]:
        database, (redis, workers) = await asyncio.gather(self._database(), self._workers())
        self._checked_at = time.monotonic()
        return {"database": database, "redis": redis, "workers": workers}

    async def _database(self) -> str:
        # A thread that still waits for a database that hangs is waited for again, never joined by a second one.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(_ask_database), name="ask-database")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.shield(self._asking)
        except TimeoutError:
            return "does not answer in time"

    async def _workers(self) -> tuple[str, str]:
        broker = get_runtime().broker
        try:
            workers, starting = await asyncio.gather(broker.workers(), broker.starting())
        except BrokerUnavailable as error:
            log.warning("not_ready", part="redis", error=str(error))
            return "can't be reached", "unknown"
        return OK, said_of_workers(workers, starting.values())


def said_of_workers(workers: Collection[WorkerStatus], starting: Collection[WorkerStarting]) -> str:
    """`ok`, or why none of them takes requests and how long that is likely to last. Names no model."""
    if any(not worker.draining for worker in workers):
        return OK
    compiling = [each.for_s for each in starting if each.stage == StartStage.COMPILING]
    if compiling:
        return (
            "one is starting: it compiles its kernels, once per machine, which takes a minute or two; "
            f"it has been at it for {max(compiling):.0f} s"
        )
    if starting:
        return f"one is starting: it loads its model, for {max(each.for_s for each in starting):.0f} s so far"
    return "all are draining" if workers else "none is alive"


def _ask_database() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        log.warning("not_ready", part="database", error=type(error).__name__)
        return "can't be reached"
    finally:
        connection.close()
    return OK


_readiness: WeakKeyDictionary[asyncio.AbstractEventLoop, Readiness] = WeakKeyDictionary()


def _no_store(body: dict[str, Any], status: int) -> HttpResponse:
    response = HttpResponse(msgspec.json.encode(body), content_type="application/json", status=status)
    response.headers["Cache-Control"] = "no-store"
    return response


async def alive(request: HttpRequest) -> HttpResponse:
    """`/healthz`: the process answers. Asks nobody: restarting a gateway does not heal a database."""
    return _no_store({"status": OK}, 200)


async def ready(request: HttpRequest) -> HttpResponse:
    """`/readyz`: 200 while requests can be served, else 503 with what is missing."""
    loop = asyncio.get_running_loop()
    readiness = _readiness.get(loop)
    if readiness is None:
        readiness = _readiness[loop] = Readiness()
    checks = await readiness.checks()
    is_ready = all(answer == OK for answer in checks.values())
    response = _no_store(
        {"status": OK if is_ready else "unavailable", "checks": checks}, 200 if is_ready else 503
    )
    if not is_ready:
        response.headers["Retry-After"] = str(_RETRY_S)
    return response
