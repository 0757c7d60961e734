"""Queue or refuse: a key whose policy is to wait has its requests take their turn for a rate, up to their deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from inference.errors import RateLimited
from inference.runtime import Runtime
from tenants.counting import counted
from tenants.principal import Principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.types import Admitted, Decision

_STEP_S: Final = 0.05
"""The next one asks so often whether it is its turn; those behind it less and less."""
_ASK_AGAIN_S: Final = 1.0
"""At the latest: what others gave back may let it in sooner than was said."""


@dataclass(frozen=True, slots=True)
class Waited:
    place: int
    """How many were before it when it came."""
    wait_s: float


async def in_turn(
    runtime: Runtime, principal: Principal, request_id: str, reserve: Callable[[], Awaitable[Decision]]
) -> tuple[Decision, Waited | None]:
    """The decision about the request, asked for once; by a key that waits when it is its turn, and again until it
    fits. What would not fit by the deadline is refused at once.

    Raises RateLimited when the line is full or the deadline passes in it; QuotaUnavailable.
    """
    if not principal.waits_for_rate or principal.key_public_id is None:
        return await reserve(), None
    tenant, key = principal.tenant_public_id, principal.key_public_id
    loop = asyncio.get_running_loop()
    began = loop.time()
    ends_at = began + principal.tier.deadline_s
    first: int | None = None
    try:
        while True:
            place = await runtime.quotas.enter_line(
                tenant, key, request_id, at_most=principal.tier.max_queued_per_tenant
            )
            if place is None:
                raise RateLimited(
                    "Too many requests of this key wait for their turn. Try again when some have ended.",
                    kind="requests",
                    retry_after_ms=1000,
                )
            first = place if first is None else first
            pause_s = min(_ASK_AGAIN_S, _STEP_S * place)
            if place == 0:
                decision = await reserve()
                waits = not isinstance(decision, Admitted) and not decision.is_spent
                wait_s = None if isinstance(decision, Admitted) else _seconds(decision.retry_after_ms)
                if not waits or wait_s is None or loop.time() + wait_s > ends_at:
                    return decision, Waited(first, loop.time() - began)
                pause_s = min(_ASK_AGAIN_S, max(0.001, wait_s))
            if loop.time() + pause_s > ends_at:
                raise RateLimited(
                    f"The request's deadline passed while it waited its turn, behind {counted(place, 'request')} of "
                    "this key's. Send fewer at once, or give them more time (x-weir-deadline-s).",
                    kind="requests",
                    retry_after_ms=1000,
                )
            await asyncio.sleep(pause_s)
    finally:
        runtime.spawn(_leave(runtime, tenant, key, request_id), name="leave-line")


async def _leave(runtime: Runtime, tenant: str, key: str, request_id: str) -> None:
    with suppress(QuotaUnavailable):  # else it is forgotten in some seconds
        await runtime.quotas.leave_line(tenant, key, request_id)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
