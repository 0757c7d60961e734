"""The console's pages that leave it: exports as files, statements for the printer."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from inference.downloads import download, export_response
from inference.models import ExportFormat, ExportState
from inference.replica import on_replica
from inference.reports import Dimension, Report
from inference.selectors import today_of
from inference.services.exports import (
    ExportNotFound,
    TooManyExports,
    content_of,
    create_export,
    get_export,
    list_exports,
)
from inference.services.partitions import months_from
from inference.statement_pdf import statement_pdf
from inference.statements import read_month, statement_of
from tenants.client_address import client_address
from tenants.console import Console, tenant_page
from tenants.services import Actor

_SPANS = (30, 90, 365)
_GROUPS = (Dimension.PROJECT, Dimension.KEY, Dimension.MODEL, Dimension.TIER)
_MONTHS = 12


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def exports(request: HttpRequest, console: Console) -> HttpResponse:
    """Usage by day, project, key, model and tier, as files; a POST asks for one. A reading: every role may."""
    if request.method != "POST":
        found = list_exports(console.tenant.pk)
        context = {
            "console": console,
            "section": "usage",
            "spans": _SPANS,
            "formats": ExportFormat.choices,
            "exports": found,
            "is_writing": any(row.state in (ExportState.QUEUED, ExportState.RUNNING) for row in found),
        }
        return render(request, "inference/exports.html", context)
    form, days = request.POST.get("format"), request.POST.get("days", "")
    if form not in ExportFormat.values or days not in map(str, _SPANS):
        messages.error(request, "Choose a format and a span.")
        return redirect("exports", console.tenant.public_id)
    until = datetime.combine(today_of(console.tenant), datetime.min.time(), console.tenant.zone)
    until += timedelta(days=1)
    report = Report(console.tenant.pk, until - timedelta(days=int(days)), until, group_by=_GROUPS)
    actor = Actor.person(console.user, ip_address=client_address(request))
    try:
        create_export(actor=actor, tenant=console.tenant, report=report, format=ExportFormat(form))
        messages.success(request, "It is being written, and shows below when it is done.")
    except TooManyExports as error:
        messages.error(request, f"{error}: ask again when one is done.")
    return redirect("exports", console.tenant.public_id)


@require_safe
@tenant_page
def export_file(request: HttpRequest, console: Console, export_id: UUID) -> HttpResponse:
    try:
        export = get_export(console.tenant.pk, str(export_id))
    except ExportNotFound:
        raise Http404 from None
    content = content_of(export)
    if content is None:
        raise Http404
    return export_response(export, content)


@require_safe
@tenant_page
def statement(request: HttpRequest, console: Console) -> HttpResponse:
    """A month's, this one's where none is named: `?month=2026-11`."""
    today = today_of(console.tenant)
    month = _month(request, today)
    last_year = [months_from(today, -n) for n in range(_MONTHS)]
    began = console.tenant.created_at.astimezone(console.tenant.zone).date()
    context = {
        "console": console,
        "section": "usage",
        "statement": on_replica(statement_of, console.tenant, month),
        "months": [each for each in last_year if each >= began.replace(day=1)],
        "is_open": month >= today.replace(day=1),
    }
    return render(request, "inference/statement.html", context)


@require_safe
@tenant_page
def statement_file(request: HttpRequest, console: Console) -> HttpResponse:
    """The same as a PDF."""
    month = _month(request, today_of(console.tenant))
    content = statement_pdf(console.tenant, statement_of(console.tenant, month))
    return download(content, f"statement-{console.tenant.slug}-{month:%Y-%m}.pdf", "application/pdf")


def _month(request: HttpRequest, today: date) -> date:
    try:
        return read_month(request.GET.get("month", f"{today:%Y-%m}"), today)
    except ValueError:
        raise Http404 from None
