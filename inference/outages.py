"""What passes by itself: a part of the platform that can't be reached at the moment. The answer says to try again."""

from __future__ import annotations

from typing import Final

import redis
import structlog
from django.db import DatabaseError, InterfaceError, OperationalError

from engine_worker.broker import BrokerUnavailable
from inference.errors import Overloaded
from tenants.auth import AuthUnavailable
from tenants.quotas.errors import QuotaUnavailable

log = structlog.get_logger(__name__)

_READ_ONLY: Final = "25006"
"""SQLSTATE of a server that was the primary until a moment ago."""


def outage(error: BaseException | None) -> Overloaded | None:
    """What to tell whoever asked, where it is that; it is in the log then."""
    if isinstance(error, AuthUnavailable):
        return Overloaded(str(error), code="auth_unavailable")
    if isinstance(error, BrokerUnavailable):
        return Overloaded(
            "The queue can't be reached at the moment. Try again shortly.", code="queue_unavailable"
        )
    if isinstance(error, QuotaUnavailable):
        return Overloaded(
            "Limits can't be checked at the moment. Try again shortly.", code="quota_unavailable"
        )
    if _is_of_database(error):
        log.warning("database_unavailable", error=str(error))
        return Overloaded(
            "The database can't be reached at the moment. Try again shortly.", code="database_unavailable"
        )
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):  # the cache's, which counts sign-ins
        log.warning("redis_unavailable", error=str(error))
        return Overloaded(
            "A part of the server can't be reached at the moment. Try again shortly.",
            code="server_unavailable",
        )
    return None


def _is_of_database(error: BaseException | None) -> bool:
    if isinstance(error, (OperationalError, InterfaceError)):
        return True
    return isinstance(error, DatabaseError) and getattr(error.__cause__, "sqlstate", None) == _READ_ONLY
