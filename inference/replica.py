"""Reports read a replica where there is one, so that they never hold up what writes the ledger.

A replica is a little behind: only what a person looks at comes from it, never what decides (limits, budgets, keys) nor
what is kept (exports, which read in one snapshot). One that is further behind than WEIR_REPLICA_MAX_LAG_S, or away, is
not asked: the primary is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from threading import Lock, Thread
from typing import Any, Final, ParamSpec, TypeVar

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError, connections
from django.db.models import Model
from prometheus_client import Counter, Gauge

log = structlog.get_logger(__name__)

REPLICA: Final = "replica"
READS = Counter(
    "weir_report_reads",
    "Reports, by where they were read: replica, primary_lagging, primary_away.",
    ["source"],
)
LAG = Gauge(
    "weir_replica_lag_seconds", "How far the replica of reports was behind when it was last looked at."
)
_LOOK_EVERY_S: Final = 1.0
_PATIENCE_S: Final = 0.5
"""So long a report waits to hear how far behind the replica is; then it asks the primary."""
_AWAY_S: Final = 5.0
"""So long nobody asks a replica that did not answer."""
SECONDS_BEHIND: Final = """
SELECT CASE
    WHEN NOT pg_is_in_recovery() THEN 0
    WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() AND EXISTS (SELECT FROM pg_stat_wal_receiver) THEN 0
    ELSE extract(epoch FROM now() - pg_last_xact_replay_timestamp()) END
"""
"""Seconds. 0 where all that came is replayed, and more still comes: an idle primary sends no transactions, and its
replica is not behind. Else the age of the last transaction: too much rather than too little."""
_reads_replica: ContextVar[bool] = ContextVar("reads_replica", default=False)
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class _Lag:
    """Looked at once a second at most, by a thread of its own: no report waits for a replica longer than a moment."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._look: Future[bool] = Future()
        self._look.set_result(True)
        self._looked_at = float("-inf")
        self._is_away = False
        self._is_small = True

    def is_small(self) -> bool:
        """Raises OperationalError, InterfaceError where the replica is away, or does not answer within _PATIENCE_S."""
        with self._lock:
            age_s = time.monotonic() - self._looked_at
            if self._look.done() and age_s > (_AWAY_S if self._is_away else _LOOK_EVERY_S):
                self._look, self._looked_at, age_s = Future(), time.monotonic(), 0.0
                Thread(target=self._run, args=[self._look], name="replica-lag", daemon=True).start()
            look, patience_s = self._look, 0.0 if self._is_away else max(0.0, _PATIENCE_S - age_s)
        try:
            return look.result(timeout=patience_s)
        except TimeoutError as error:
            with self._lock:
                self._is_away = self._is_away or (look is self._look and not look.done())
            raise OperationalError("the replica does not answer") from error

    def note_away(self, error: Exception) -> None:
        """A report found it so: the next ones need not."""
        with self._lock:
            self._is_away = True
            if self._look.done():
                self._look, self._looked_at = Future(), time.monotonic()
                self._look.set_exception(error)

    def _run(self, look: Future[bool]) -> None:
        try:
            is_small = self._ask()
        except Exception as error:
            with self._lock:
                self._is_away = True
                look.set_exception(error)
        else:
            with self._lock:
                self._is_away = False
                look.set_result(is_small)
        finally:
            connections[REPLICA].close()  # this thread's

    def _ask(self) -> bool:
        with connections[REPLICA].cursor() as cursor:
            cursor.execute(SECONDS_BEHIND)
            (lag,) = cursor.fetchone()
        lag_s = float("inf") if lag is None else float(lag)
        LAG.set(lag_s)
        if self._is_small != (lag_s <= settings.REPLICA_MAX_LAG_S):
            self._is_small = not self._is_small
            log.warning("replica_caught_up" if self._is_small else "replica_lags", lag_s=round(lag_s, 1))
        return self._is_small


_lag = _Lag()


def on_replica(read: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
    """`read(...)` with its queries on the replica; on the primary where there is none, or it lags or does not answer.

    `read` must have asked everything by the time it returns, and change nothing.
    """
    if REPLICA not in settings.DATABASES:
        return read(*args, **kwargs)
    source = "primary_lagging"
    token = _reads_replica.set(True)
    try:
        if _lag.is_small():
            try:
                result = read(*args, **kwargs)
            except (OperationalError, InterfaceError) as error:
                _lag.note_away(error)
                raise
            READS.labels(REPLICA).inc()
            return result
    except (OperationalError, InterfaceError) as error:
        source = "primary_away"
        log.warning("replica_away", error=type(error).__name__)
    finally:
        _reads_replica.reset(token)
    READS.labels(source).inc()
    return read(*args, **kwargs)


class ReplicaRouter:
    """Django's router: see https://docs.djangoproject.com/en/5.2/topics/db/multi-db/."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return REPLICA if _reads_replica.get() else None

    def allow_relation(self, one: Model, other: Model, **hints: Any) -> bool | None:
        return True  # the same rows, from two places

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if db == REPLICA else None
