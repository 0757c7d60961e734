"""Ends what runs for a tenant that is suspended, or about to be deleted, while it runs.

A key is refused within a second by the auth epoch; a stream that began before has no key to show any more. So each
gateway asks about the tenants of its open generations twice a second, in one query, and only while there are any.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final
from uuid import UUID
from weakref import WeakSet

import structlog
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from tenants.principal_selectors import suspended_among

if TYPE_CHECKING:
    from inference.services.generation import Generation

log = structlog.get_logger(__name__)

INTERVAL_S: Final = 0.5
_DATABASE_TIMEOUT_S: Final = 2.0


class TenantWatch:
    """One per event loop."""

    def __init__(self) -> None:
        self._open: WeakSet[Generation] = WeakSet()
        self._task: asyncio.Task[None] | None = None
        # Its own: a hung database must not hold up whatever waits for Django's one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenant-watch")

    def add(self, generation: Generation) -> None:
        self._open.add(generation)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="tenant-watch")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            running = [generation for generation in self._open if generation.is_running]
            if not running:
                return
            tenants = {generation.ticket.tenant_id for generation in running}
            try:
                async with asyncio.timeout(_DATABASE_TIMEOUT_S):
                    loop = asyncio.get_running_loop()
                    barred = await loop.run_in_executor(self._thread, _suspended, tenants)
            except (DatabaseError, InterfaceError, TimeoutError):
                continue  # known keys go on being served then, and so do their streams
            for generation in running:
                if generation.ticket.tenant_id in barred:
                    log.info("generation_barred", request_id=generation.ticket.request_id)
                    generation.bar()


def _suspended(tenants: set[str]) -> set[str]:
    close_old_connections()
    try:
        return suspended_among(UUID(tenant) for tenant in tenants)
    finally:
        connection.close()
