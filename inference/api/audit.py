"""`GET /v1/audit`, and `.../export` as CSV: the tenant's audit log, for keys with the scope `admin`."""

from __future__ import annotations

from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.api.report_parameters import read_moment, read_number
from inference.downloads import download
from inference.errors import InvalidRequest
from inference.schemas.audit import AuditPage, audit_object
from tenants.audit_log import COLUMNS, AuditWanted, audit_page, audit_rows
from tenants.csv_text import as_csv
from tenants.principal import Scope

_NARROWING: Final = {"q", "action", "actor", "target", "start", "end"}
_LIMIT_MAX: Final = 500


@endpoint("GET", scope=Scope.ADMIN)
async def audit(call: ApiCall) -> HttpResponse:
    asked = call.request.GET
    wanted = _wanted(call, {"limit", "page"})
    limit = read_number(asked.get("limit"), "limit", default=50)
    if not 1 <= limit <= _LIMIT_MAX:
        raise InvalidRequest(f"'limit' is 1 to {_LIMIT_MAX}.", param="limit")
    entries, after = await sync_to_async(audit_page)(
        call.principal.tenant_id, wanted, limit=limit, before=asked.get("page", "")
    )
    return call.respond(AuditPage([audit_object(entry) for entry in entries], bool(after), after or None))


@endpoint("GET", scope=Scope.ADMIN)
async def export(call: ApiCall) -> HttpResponse:
    wanted, tenant_id = _wanted(call, set()), call.principal.tenant_id
    content = await sync_to_async(lambda: as_csv(COLUMNS, audit_rows(tenant_id, wanted)))()
    return download(content, "audit.csv", "text/csv; charset=utf-8")


def _wanted(call: ApiCall, more: set[str]) -> AuditWanted:
    asked = call.request.GET
    for name in asked:
        if name not in _NARROWING | more:
            raise InvalidRequest(f"There is no parameter '{name[:80]}' here.", param=name[:80])
    try:
        target = UUID(asked["target"]) if "target" in asked else None
    except ValueError:
        raise InvalidRequest("'target' is an id.", param="target") from None
    zone = ZoneInfo(call.principal.zone)
    return AuditWanted(
        text=asked.get("q", "")[:200],
        action=asked.get("action", "")[:64],
        actor=asked.get("actor", "")[:254],
        target_id=target,
        since=read_moment(asked.get("start"), "start", zone),
        until=read_moment(asked.get("end"), "end", zone),
    )
