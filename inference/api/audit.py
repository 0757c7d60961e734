"""`GET /v1/audit`, and `.../export` as CSV: the tenant's audit log, for keys with the scope `admin`."""

from __future__ import annotations

from uuid import UUID
from zoneinfo import ZoneInfo

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.api.report_parameters import read_moment
from inference.downloads import download
from inference.errors import InvalidRequest
from inference.schemas.audit import AuditPage, audit_object
from inference.schemas.queries import AuditPageQuery, AuditQuery
from tenants.audit_log import COLUMNS, AuditWanted, audit_page, audit_rows, is_place
from tenants.csv_text import as_csv
from tenants.principal import Scope


@endpoint("GET", scope=Scope.ADMIN, query=AuditPageQuery, answer=AuditPage)
async def audit(call: ApiCall) -> HttpResponse:
    """Who changed what, from where, before and after; newest first."""
    asked = call.query(AuditPageQuery, refuses_others=True)
    if asked.page and not is_place(asked.page):
        raise InvalidRequest("'page' will not do: give the 'next_page' of an answer.", param="page")
    entries, after = await sync_to_async(audit_page)(
        call.principal.tenant_id, _wanted(call, asked), limit=asked.limit, before=asked.page or ""
    )
    return call.respond(AuditPage([audit_object(entry) for entry in entries], bool(after), after or None))


@endpoint("GET", scope=Scope.ADMIN, query=AuditQuery, answer=bytes, media=("text/csv; charset=utf-8",))
async def export(call: ApiCall) -> HttpResponse:
    """The same as CSV, at most 200,000 lines."""
    wanted, tenant_id = _wanted(call, call.query(AuditQuery, refuses_others=True)), call.principal.tenant_id
    content = await sync_to_async(lambda: as_csv(COLUMNS, audit_rows(tenant_id, wanted)))()
    return download(content, "audit.csv", "text/csv; charset=utf-8")


def _wanted(call: ApiCall, asked: AuditQuery) -> AuditWanted:
    try:
        target = None if asked.target is None else UUID(asked.target)
    except ValueError:
        raise InvalidRequest("'target' must be an id, as this log has them.", param="target") from None
    zone = ZoneInfo(call.principal.zone)
    return AuditWanted(
        text=asked.q,
        action=asked.action,
        actor=asked.actor,
        target_id=target,
        since=read_moment(asked.start, "start", zone),
        until=read_moment(asked.end, "end", zone),
    )
