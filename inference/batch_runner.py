"""What runs batches: their lines through the queue, as requests of the batch tier.

Runs again and again for a while each time (Celery), one process at a time, and may die anywhere. A line's
request id follows from the batch: a line that runs already, or has run, is taken up from its token log
instead of being run twice, and one that has ended has its row.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.utils import timezone

from inference.batch_lines import Line
from inference.errors import (
    ApiError,
    Conflict,
    Overloaded,
    RateLimited,
)
from inference.models import Batch, BatchStatus
from inference.runtime import Runtime, close_runtime, get_runtime
from inference.schemas.batches import BatchLine
from inference.services import batches
from inference.services.generation import Generation
from tenants.principal import Principal
from tenants.principal_selectors import find_batch_principal

log = structlog.get_logger(__name__)

LINES_AT_ONCE: Final = 16
_RUNNER_LOCK: Final = 0x7765_6972_6261_7463
"""Key of the advisory lock of the one runner: "weirbatc"."""
_LAST_LINES_S: Final = 20.0
"""So long do lines that run have, when the time is up; the next run takes up what is left."""
_WAIT_MAX_S: Final = 30.0
_LOOK_S: Final = 0.5
_ATTEMPTS_MAX: Final = 1000


def run_batches(*, budget_s: float = 60.0) -> None:
    """Goes on with every open batch, for about so long. Returns at once where another process does that."""
    with _only_runner() as is_only:
        if is_only:
            async_to_sync(_run)(time.monotonic() + budget_s)


@contextmanager
def _only_runner() -> Iterator[bool]:
    # A transaction's lock and not a session's, which would stay with whatever session a pooler had lent; and of a
    # connection of its own, since what the lines write must not wait for its end.
    holder = connection.copy()
    try:
        holder.set_autocommit(False)
        with holder.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_RUNNER_LOCK])
            (is_only,) = cursor.fetchone() or (False,)
        yield is_only
    finally:
        with suppress(DatabaseError, InterfaceError):
            holder.rollback()
        holder.close()


async def _run(until: float) -> None:
    runtime = get_runtime()
    try:
        rows = await sync_to_async(batches.open_batches)()
        some = rows[:LINES_AT_ONCE]
        runs = [_BatchRun(runtime, batch, until, max(1, LINES_AT_ONCE // len(some))) for batch in some]
        for outcome in await asyncio.gather(*(run.go_on() for run in runs), return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("batch_run_failed", exc_info=outcome)
    finally:
        await close_runtime()


class _BatchRun:
    def __init__(self, runtime: Runtime, batch: Batch, until: float, at_once: int) -> None:
        self._runtime = runtime
        self._batch = batch
        self._until = until
        self._at_once = at_once
        self._todo: deque[tuple[int, BatchLine]] = deque()
        self._running: dict[str, str] = {}
        """Request id to model, of the lines that are at the engine."""

    async def go_on(self) -> None:
        batch = self._batch
        lines = await sync_to_async(batches.lines_of)(batch)
        if lines is None:
            return
        principal = await sync_to_async(find_batch_principal)(
            batch.tenant_id, batch.key_public_id, settings.BATCH_TIER
        )
        done = await sync_to_async(batches.ended_lines)(batch)
        self._todo.extend((number, line) for number, line in enumerate(lines) if number not in done)
        if principal is None:
            await self._end_rest("invalid_api_key", "The batch's key is not valid any more.")
            await self._end(BatchStatus.COMPLETED)
            return
        workers = [
            asyncio.create_task(self._work(principal), name=f"batch-line-{index}")
            for index in range(min(self._at_once, len(self._todo)))
        ]
        stopped = await self._watch(workers)
        if stopped is not None:
            for request_id, model in self._running.items():
                await self._runtime.broker.cancel(model, request_id)
            if stopped is BatchStatus.EXPIRED:
                await self._end_rest(
                    "batch_expired", "The batch's 24 hours were over before this line's turn."
                )
            await self._end(stopped)
        elif len(await sync_to_async(batches.ended_lines)(batch)) == len(lines):
            await self._end(BatchStatus.COMPLETED)

    async def _watch(self, workers: list[asyncio.Task[None]]) -> BatchStatus | None:
        """Until the lines have ended, or the time is up, or the batch is to end: then how."""
        try:
            while True:
                if await sync_to_async(batches.status_of)(self._batch) == BatchStatus.CANCELLING:
                    return BatchStatus.CANCELLED
                if timezone.now() >= self._batch.expires_at:
                    return BatchStatus.EXPIRED
                if not workers or time.monotonic() > self._until + _LAST_LINES_S:
                    return None
                _, pending = await asyncio.wait(workers, timeout=_LOOK_S)
                if not pending:
                    for worker in workers:
                        worker.result()
                    return None
        finally:
            # Without leaving their generations: those go on, and are taken up by the next run.
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, principal: Principal) -> None:
        while self._todo and time.monotonic() < self._until:
            number, line = self._todo.popleft()
            try:
                request_id, status, answer = await self._answer(principal, number, line)
            except _NotNow:
                return
            told = {
                "id": f"batch_req_{self._batch.batch_id.removeprefix('batch_')}_{number}",
                "custom_id": line.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": answer},
                "error": None,
            }
            await sync_to_async(batches.record_line)(self._batch, number, told, is_error=status != 200)

    async def _answer(self, principal: Principal, number: int, line: BatchLine) -> tuple[str, int, Any]:
        """The id of its last attempt, a status and a body."""
        request_id = ""
        refused: ApiError = Overloaded("The line was refused too often. Send it in another batch.")
        for attempt in range(_ATTEMPTS_MAX):
            request_id = f"{self._batch.batch_id.replace('_', '-')}-{number}-{attempt}"
            try:
                return request_id, 200, await self._attempt(principal, request_id, line)
            except Conflict:
                continue  # an attempt that was refused
            except (RateLimited, Overloaded) as error:
                wait_s = min((error.retry_after_ms or 1000) / 1000, _WAIT_MAX_S)
                if time.monotonic() + wait_s > self._until:
                    raise _NotNow from error
                await asyncio.sleep(wait_s)
            except ApiError as error:
                refused = error
                break
        return request_id, refused.http_status, {"error": refused.body()}

    async def _attempt(self, principal: Principal, request_id: str, line: BatchLine) -> Any:
        """The line's answer, begun now or by a run that died. Raises Conflict where that attempt was refused."""
        running: list[str] = []

        def begun(generation: Generation) -> None:
            running.append(generation.ticket.request_id)
            self._running[generation.ticket.request_id] = generation.ticket.model

        try:
            answer = await Line(self._runtime, principal, request_id, begun).answer(line.url, line.body)
        except ApiError as error:
            self._ended(running)
            if error.code == "request_cancelled":
                raise _NotNow from error
            raise
        self._ended(running)
        return answer

    def _ended(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def _end_rest(self, code: str, message: str) -> None:
        """Every line without a result gets this one."""
        done = await sync_to_async(batches.ended_lines)(self._batch)
        for number, line in enumerate(await sync_to_async(batches.lines_of)(self._batch) or ()):
            if number not in done:
                told = {
                    "id": f"batch_req_{self._batch.batch_id.removeprefix('batch_')}_{number}",
                    "custom_id": line.custom_id,
                    "response": None,
                    "error": {"code": code, "message": message},
                }
                await sync_to_async(batches.record_line)(self._batch, number, told, is_error=True)

    async def _end(self, status: BatchStatus) -> None:
        await sync_to_async(batches.end_batch)(self._batch, status)


class _NotNow(Exception):
    """The line is left to the next run."""
