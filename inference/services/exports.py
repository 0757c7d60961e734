"""Exports: a report is asked for, written to a file by a task, fetched while it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import structlog
from django.db import connection, transaction
from django.db.models import F, Q
from django.utils import timezone

from inference.models import ExportFile, ExportFormat, ExportState, UsageExport
from inference.reports import Dimension, Line, Report, Width, usage_page
from inference.services.report_files import as_xlsx, cells, columns
from tenants.csv_text import Cell, as_csv
from tenants.models import ApiKey, Project, Tenant
from tenants.services import Actor
from tenants.services.audit import record_audit

log = structlog.get_logger(__name__)

_KEPT: Final = timedelta(days=7)
_OPEN_MAX: Final = 5
"""So many may wait at once, a tenant."""
_ATTEMPTS: Final = 3
_ABANDONED: Final = timedelta(minutes=10)
"""Longer than its task may run (Celery's time limit): whoever wrote it is dead."""
_ROWS_MAX: Final = 200_000
_PAGE: Final = 1000


class TooManyExports(Exception):
    """So many are still being written that one more must wait."""


class ExportNotFound(Exception):
    """There is no such export in this tenant: absent, expired and another tenant's are the same."""


class _TooLong(Exception):
    """The report has more lines than a file may."""


def create_export(*, actor: Actor, tenant: Tenant, report: Report, format: ExportFormat) -> UsageExport:
    """Raises TooManyExports."""
    with transaction.atomic():
        # One at a time, a tenant: two can't both be the last that may wait.
        Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
        waiting = UsageExport.objects.for_tenant(tenant).filter(
            state__in=(ExportState.QUEUED, ExportState.RUNNING)
        )
        if waiting.count() >= _OPEN_MAX:
            raise TooManyExports(f"{_OPEN_MAX} exports are still being written")
        export = UsageExport.objects.create(
            tenant=tenant,
            format=format,
            asked=_as_json(report),
            requested_by=actor.label,
            expires_at=timezone.now() + _KEPT,
        )
        record_audit(
            actor=actor,
            action="usage.exported",
            tenant=tenant,
            target=export,
            after={"format": format, **export.asked},
        )
    return export


def list_exports(tenant_id: int) -> list[UsageExport]:
    """The newest of those that are kept."""
    return list(UsageExport.objects.for_tenant(tenant_id).filter(expires_at__gt=timezone.now())[:100])


def get_export(tenant_id: int, public_id: str) -> UsageExport:
    """Raises ExportNotFound."""
    try:
        return UsageExport.objects.for_tenant(tenant_id).get(
            public_id=UUID(public_id), expires_at__gt=timezone.now()
        )
    except (ValueError, UsageExport.DoesNotExist):
        raise ExportNotFound(public_id) from None


def content_of(export: UsageExport) -> bytes | None:
    """None while it is not written."""
    content = ExportFile.objects.filter(export=export).values_list("content", flat=True).first()
    return None if content is None else bytes(content)


def write_exports(now: datetime | None = None) -> int:
    """Writes what waits, oldest first, and forgets what has expired; any number may run at once."""
    now = now or timezone.now()
    UsageExport.unscoped.filter(expires_at__lte=now).delete()
    written = 0
    while (export := _claim(now)) is not None:
        _write(export)
        written += 1
    return written


@transaction.atomic
def _claim(now: datetime) -> UsageExport | None:
    open_ones = Q(state=ExportState.QUEUED) | Q(state=ExportState.RUNNING, started_at__lt=now - _ABANDONED)
    export = (
        UsageExport.unscoped.select_for_update(skip_locked=True, of=("self",))
        .select_related("tenant")
        .filter(open_ones)
        .order_by("id")
        .first()
    )
    if export is not None:
        export.state, export.started_at = ExportState.RUNNING, timezone.now()
        UsageExport.objects.filter(tenant=export.tenant, pk=export.pk).update(
            state=export.state, started_at=export.started_at, attempts=F("attempts") + 1
        )
    return export


def _write(export: UsageExport) -> None:
    if export.attempts >= _ATTEMPTS:
        return _fail(export, "It could not be written. Ask for a shorter span.")
    report = _from_json(export)
    rows = _Rows(report, _names(export.tenant))
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                # Its pages are read one after the other, and see one moment all the same.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            as_file = as_csv if export.format == ExportFormat.CSV else as_xlsx
            content = as_file(columns(report), rows)
    except _TooLong:
        return _fail(export, f"It has more than {_ROWS_MAX:,} lines. Ask for a shorter span or fewer groups.")
    except Exception:
        log.exception("export_failed", export=str(export.public_id), tenant=str(export.tenant.public_id))
        return _fail(export, "It could not be written. The operator can see why in the log.")
    with transaction.atomic():
        if _end(export, state=ExportState.DONE, rows=rows.count, total_microusd=rows.total_microusd):
            ExportFile.objects.create(export=export, content=content)


def _fail(export: UsageExport, why: str) -> None:
    _end(export, state=ExportState.FAILED, error=why)


def _end(export: UsageExport, **values: Any) -> bool:
    """False where another has taken it over meanwhile."""
    mine = UsageExport.objects.filter(
        tenant=export.tenant, pk=export.pk, state=ExportState.RUNNING, started_at=export.started_at
    )
    return mine.update(finished_at=timezone.now(), **values) == 1


class _Rows:
    """The report's lines as cells, counted and summed as they are read."""

    def __init__(self, report: Report, names: dict[str, str]) -> None:
        self._report, self._names = report, names
        self.count = self.total_microusd = 0

    def __iter__(self) -> Iterator[list[Cell]]:
        for line in _lines(self._report):
            if self.count >= _ROWS_MAX:
                raise _TooLong
            self.count += 1
            self.total_microusd += line.total_microusd
            yield cells(line, self._report, self._names)


def _lines(report: Report) -> Iterator[Line]:
    cursor = None
    while True:
        page = usage_page(report, limit=_PAGE, cursor=cursor)
        yield from page.lines
        cursor = page.next_cursor
        if cursor is None:
            return


def _names(tenant: Tenant) -> dict[str, str]:
    rows = [
        *ApiKey.objects.for_tenant(tenant).values_list("public_id", "name"),
        *Project.objects.for_tenant(tenant).values_list("public_id", "name"),
    ]
    return {str(public_id): name for public_id, name in rows}


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "since": report.since.isoformat(),
        "until": report.until.isoformat(),
        "width": report.width,
        "group_by": list(report.group_by),
        "filters": {dimension: list(values) for dimension, values in (report.filters or {}).items()},
    }


def _from_json(export: UsageExport) -> Report:
    asked = export.asked
    return Report(
        tenant_id=export.tenant_id,
        since=datetime.fromisoformat(asked["since"]),
        until=datetime.fromisoformat(asked["until"]),
        width=Width(asked["width"]),
        group_by=tuple(Dimension(name) for name in asked["group_by"]),
        filters={Dimension(name): values for name, values in asked["filters"].items()},
    )
