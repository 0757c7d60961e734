"""What is left of a principal's limits, for pages. The token path asks the store itself."""

from __future__ import annotations

import structlog
from asgiref.sync import async_to_sync
from django.conf import settings

from tenants.principal import Principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import BucketState

log = structlog.get_logger(__name__)

_TIMEOUT_S = 1.0
"""A page would rather say that it does not know than wait longer."""


def limits_left(principal: Principal) -> tuple[BucketState, ...] | None:
    """None when Redis can't say."""
    try:
        return async_to_sync(_limits_left)(principal)
    except QuotaUnavailable as error:
        log.warning("limits.unavailable", error=str(error))
        return None


async def _limits_left(principal: Principal) -> tuple[BucketState, ...]:
    # A store of its own: a page runs on whatever event loop its thread was given.
    store = QuotaStore(settings.REDIS_URL, timeout_s=_TIMEOUT_S, max_connections=1)
    try:
        return await store.peek(principal)
    finally:
        await store.aclose()
