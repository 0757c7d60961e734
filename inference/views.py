"""The console's pages about inference: start page, docs, overview, usage."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_safe

from inference import selectors
from inference.fleet import served_models
from tenants.console import Console, last_console, tenant_page
from tenants.quotas.gauges import limits_left
from tenants.selectors import api_key_names

_RECENT_REQUESTS = 15
_USAGE_SPANS = (7, 30, 90)


def api_example(request: HttpRequest) -> dict[str, Any]:
    """What a copied command needs to work against this very installation."""
    models = served_models()
    return {
        "base_url": request.build_absolute_uri("/v1"),
        "example_model": models[0].name if models else settings.MODEL_NAME or settings.MODEL,
    }


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """The start page; a member goes on to the tenant they looked at last."""
    if not request.user.is_authenticated:
        return render(request, "tenants/landing.html", api_example(request))
    console = last_console(request)
    if console is None:
        return render(request, "tenants/no_tenant.html")
    return redirect("overview", console.tenant.public_id)


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    console = last_console(request)
    shell = "console.html" if console else "public.html"
    context = {"docs_shell": shell, "console": console, "section": "docs", **api_example(request)}
    return render(request, "inference/docs.html", context)


@require_safe
@tenant_page
def overview(request: HttpRequest, console: Console) -> HttpResponse:
    today, month = selectors.today_and_this_month(console.tenant)
    recent = selectors.recent_requests(console.tenant, limit=_RECENT_REQUESTS)
    key_ids = {record.key_public_id for record in recent if record.key_public_id}
    names = api_key_names(console.tenant, key_ids)
    context = {
        "console": console,
        "section": "overview",
        "today": today,
        "month": month,
        "limits": limits_left(console.principal()),
        "requests": [(record, record.key_public_id and names.get(record.key_public_id)) for record in recent],
        **api_example(request),
    }
    return render(request, "inference/overview.html", context)


@require_safe
@tenant_page
def limits(request: HttpRequest, console: Console) -> HttpResponse:
    """The overview's gauges alone, for their refresh."""
    context = {"console": console, "limits": limits_left(console.principal())}
    return render(request, "inference/limits.html", context)


@require_safe
@tenant_page
def usage(request: HttpRequest, console: Console) -> HttpResponse:
    asked = request.GET.get("days", "")
    days = int(asked) if asked.isdecimal() and int(asked) in _USAGE_SPANS else _USAGE_SPANS[1]
    rows = selectors.usage_by_day_and_model(console.tenant, days=days)
    context = {
        "console": console,
        "section": "usage",
        "days": days,
        "spans": _USAGE_SPANS,
        "rows": rows,
        "total": selectors.total(rows),
    }
    return render(request, "inference/usage.html", context)
