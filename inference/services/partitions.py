"""The ledger's partitions: one a month, made ahead, and dropped whole when they are kept no longer."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Final

import structlog
from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from inference.models import RecordedRequest
from tenants.row_security import close_partitions

log = structlog.get_logger(__name__)

_MONTHS_AHEAD: Final = 3
_LEDGER_LOCK: Final = 0x7765_6972_6C65_6467
"""Key of the advisory lock of all who write to the ledger: "weirledg"."""


def lock_ledger() -> None:
    """Until the end of this transaction nobody else adds to the ledger.

    Writers would wait for each other's roll-ups anyway; in turn they can't deadlock, and what one finds
    not recorded yet stays so until it has recorded it.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LEDGER_LOCK])


def ensure_partitions(months: Iterable[date]) -> int:
    """Makes those that are missing, under the caller's `lock_ledger`. Returns how many it made."""
    firsts = sorted({month.replace(day=1) for month in months})
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FILTER (WHERE inference_ensure_usage_partition(month))"
            " FROM unnest(%s::date[]) AS month",
            [firsts],
        )
        (made,) = cursor.fetchone()
    if made:
        close_partitions(connection)
    return int(made)


@transaction.atomic
def make_partitions_ahead(now: datetime | None = None) -> int:
    """This month's and the next ones': no request has to wait for its month's first row."""
    first = (now or timezone.now()).astimezone(UTC).date().replace(day=1)
    lock_ledger()
    return ensure_partitions(months_from(first, n) for n in range(_MONTHS_AHEAD + 1))


def months_from(first: date, count: int) -> date:
    """The first day of the month `count` after (below 0: before) `first`'s."""
    years, month = divmod(first.month - 1 + count, 12)
    return date(first.year + years, month + 1, 1)


def partition_months() -> list[date]:
    """The first days of the months that the ledger has, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT to_date(right(inhrelid::regclass::text, 7), 'YYYY_MM') FROM pg_inherits"
            " WHERE inhparent = 'inference_usagerecord'::regclass ORDER BY 1"
        )
        return [month for (month,) in cursor.fetchall()]


@transaction.atomic
def drop_partitions_before(month: date) -> list[date]:
    """Forgets the single requests of the months before; their roll-ups stay. Returns the months dropped."""
    lock_ledger()
    dropped = [old for old in partition_months() if old < month.replace(day=1)]
    with connection.cursor() as cursor:
        for old in dropped:
            cursor.execute(f"DROP TABLE inference_usagerecord_{old:%Y_%m}")
    if dropped:
        ends_at = datetime.combine(months_from(dropped[-1], 1), datetime.min.time(), UTC)
        RecordedRequest.objects.filter(created_at__lt=ends_at).delete()
        log.info("ledger_months_dropped", months=[f"{old:%Y-%m}" for old in dropped])
    return dropped


def drop_old_months(now: datetime | None = None) -> list[date]:
    """Drops what the installation keeps no longer. This month and the one before stay whatever is set: budgets
    and reports of the present are rebuilt from them. Returns the months dropped."""
    if not settings.LEDGER_KEPT_MONTHS:
        return []
    first = (now or timezone.now()).astimezone(UTC).date().replace(day=1)
    return drop_partitions_before(months_from(first, -settings.LEDGER_KEPT_MONTHS))
