"""Ends what runs for a tenant that is suspended, or about to be deleted, while it runs.

A key is refused within a second by the auth epoch; a stream that began before has no key to show any more. So each
gateway asks about the tenants of its open generations twice a second, in one query, and only while there are any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from inference.generation_watch import GenerationWatch
from tenants.principal_selectors import suspended_among

if TYPE_CHECKING:
    from inference.services.generation import Generation

log = structlog.get_logger(__name__)

_DATABASE_TIMEOUT_S: Final = 2.0


class TenantWatch(GenerationWatch):
    INTERVAL_S = 0.5

    def __init__(self) -> None:
        super().__init__()
        # Its own: a hung database must not hold up whatever waits for Django's one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenant-watch")

    async def aclose(self) -> None:
        await super().aclose()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _look(self, running: Sequence[Generation]) -> None:
        tenants = {generation.ticket.tenant_id for generation in running}
        try:
            async with asyncio.timeout(_DATABASE_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                barred = await loop.run_in_executor(self._thread, _suspended, tenants)
        except (DatabaseError, InterfaceError, TimeoutError):
            return  # known keys go on being served then, and so do their streams
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
