"""Reports read a replica where there is one, so that they never hold up what writes the ledger.

A replica is a little behind: only what a person looks at comes from it, never what decides (limits, budgets, keys) nor
what is kept (exports, which read in one snapshot).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.db.models import Model

log = structlog.get_logger(__name__)

REPLICA: Final = "replica"
_reads_replica: ContextVar[bool] = ContextVar("reads_replica", default=False)
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def on_replica(read: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
    """`read(...)` with its queries on the replica; on the primary where there is none or it does not answer.

    `read` must have asked everything by the time it returns, and change nothing.
    """
    if REPLICA not in settings.DATABASES:
        return read(*args, **kwargs)
    token = _reads_replica.set(True)
    try:
        return read(*args, **kwargs)
    except (OperationalError, InterfaceError) as error:
        log.warning("replica_away", error=type(error).__name__)
    finally:
        _reads_replica.reset(token)
    return read(*args, **kwargs)


class ReplicaRouter:
    """Django's router: see https://docs.djangoproject.com/en/5.2/topics/db/multi-db/."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return REPLICA if _reads_replica.get() else None

    def allow_relation(self, one: Model, other: Model, **hints: Any) -> bool | None:
        return True  # the same rows, from two places

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if db == REPLICA else None
