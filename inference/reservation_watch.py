"""What runs has its reservation, also after a Redis forgot it.

A cluster can lose the node with a tenant's limits and keep the one with its requests; a server that comes back may lack
its last second. Then answers go on that no limit knows of. So each gateway asks about the reservations of its open
generations every two seconds, in one round trip and only while there are any, and takes again what is gone: slots are
counted, budgets held, and the end is settled as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from inference.generation_watch import GenerationWatch
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.store import QuotaStore

if TYPE_CHECKING:
    from inference.services.generation import Generation

log = structlog.get_logger(__name__)


class ReservationWatch(GenerationWatch):
    INTERVAL_S = 2.0

    def __init__(self, quotas: QuotaStore) -> None:
        super().__init__()
        self._quotas = quotas

    async def _look(self, running: Sequence[Generation]) -> None:
        ids = [(each.ticket.tenant_id, each.ticket.reservation_id) for each in running]
        try:
            forgotten = await self._quotas.forgotten(ids)
            for generation, is_forgotten in zip(running, forgotten, strict=True):
                if is_forgotten and generation.is_running:
                    await self._take_again(generation)
        except QuotaUnavailable:
            return  # Redis is away: the next look finds out what it has kept

    async def _take_again(self, generation: Generation) -> None:
        ticket = generation.ticket
        assert ticket.take_again is not None
        try:
            await ticket.take_again()
        except ReservationClosed:
            return
        log.warning("reservation_taken_again", request_id=ticket.request_id)
        if not generation.is_running:
            # It ended meanwhile, and was not settled for want of a reservation: the ledger charges it in full.
            await self._quotas.release(
                tenant_public_id=ticket.tenant_id, reservation_id=ticket.reservation_id
            )
