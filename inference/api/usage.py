"""`GET /v1/usage` and `GET /v1/usage/costs`: what the tenant used, from the ledger's roll-ups."""

from __future__ import annotations

from functools import partial
from typing import Final

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.api.report_parameters import read_number, read_report
from inference.downloads import download
from inference.errors import InvalidRequest
from inference.replica import on_replica
from inference.reports import BadCursor, usage_page
from inference.schemas.queries import StatementQuery, UsageQuery
from inference.schemas.reading import refuse_unknown
from inference.schemas.usage import UsagePage, usage_line
from inference.selectors import today_of
from inference.statement_pdf import statement_pdf
from inference.statements import read_month, statement_of
from tenants.models import Tenant
from tenants.principal import Scope

_LIMIT_MAX: Final = 1000
_LIMIT: Final = 100


@endpoint("GET", scope=Scope.USAGE_READ, query=UsageQuery, answer=UsagePage)
async def usage(call: ApiCall) -> HttpResponse:
    """What the tenant used."""
    return await _page(call, with_counts=True)


@endpoint("GET", scope=Scope.USAGE_READ, query=UsageQuery, answer=UsagePage)
async def costs(call: ApiCall) -> HttpResponse:
    """What it cost, in micro-USD."""
    return await _page(call, with_counts=False)


@endpoint("GET", scope=Scope.USAGE_READ, query=StatementQuery, answer=bytes, media=("application/pdf",))
async def statement(call: ApiCall) -> HttpResponse:
    """A month's statement as a PDF."""
    asked = call.query(StatementQuery).month
    file = await sync_to_async(partial(_statement_file, call.principal.tenant_id, asked))()
    return download(file, f"statement-{asked}.pdf", "application/pdf")


def _statement_file(tenant_id: int, asked: str) -> bytes:
    tenant = Tenant.objects.get(pk=tenant_id)
    try:
        month = read_month(asked, today_of(tenant))
    except ValueError:
        raise InvalidRequest("'month' must be one such as 2026-11.", param="month") from None
    return statement_pdf(tenant, statement_of(tenant, month))


async def _page(call: ApiCall, *, with_counts: bool) -> HttpResponse:
    asked = call.request.GET
    refuse_unknown(asked, UsageQuery)
    report = read_report(asked, call.principal)
    limit = read_number(asked.get("limit"), "limit", default=_LIMIT)
    if not 1 <= limit <= _LIMIT_MAX:
        raise InvalidRequest(f"'limit' must be from 1 to {_LIMIT_MAX}.", param="limit")
    try:
        page = await sync_to_async(
            partial(on_replica, usage_page, report, limit=limit, cursor=asked.get("page"))
        )()
    except BadCursor as error:
        raise InvalidRequest(
            f"'page' will not do: {error}. Give the 'next_page' of an answer.", param="page"
        ) from None
    lines = [usage_line(line, with_counts=with_counts) for line in page.lines]
    return call.respond(UsagePage(lines, page.next_cursor is not None, page.next_cursor))
