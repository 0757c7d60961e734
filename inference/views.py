"""The console's pages about inference: start page, docs, overview."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_safe

from inference import selectors
from inference.api.urls import api_document
from inference.api_reference import operation_rows, struct_rows
from inference.fleet import chat_models
from inference.services.recall import recall_from_ledger
from tenants.console import Console, last_console, tenant_page
from tenants.models import Tenant
from tenants.quotas.gauges import limit_gauges
from tenants.selectors import api_key_names
from tenants.services.first_run import has_operator, read_setup, setup_command

_RECENT_REQUESTS = 15


def api_example(request: HttpRequest, tenant: Tenant | None = None) -> dict[str, Any]:
    """What a copied command needs to work against this very installation, for that tenant or for anybody."""
    models = chat_models(tenant)
    return {
        "base_url": request.build_absolute_uri("/v1"),
        "example_model": models[0] if models else settings.MODEL_NAME or settings.MODEL,
    }


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """The start page; a member goes on to the tenant they looked at last."""
    if not request.user.is_authenticated:
        if not has_operator():
            return render(request, "inference/setup_empty.html", {"command": setup_command()})
        return render(request, "tenants/landing.html", api_example(request))
    console = last_console(request)
    if console is None:
        if request.user.is_superuser and not read_setup().is_done:
            return redirect("setup")
        return render(request, "tenants/no_tenant.html")
    return redirect("overview", console.tenant.public_id)


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    console = last_console(request)
    shell = "console.html" if console else "public.html"
    tenant = console.tenant if console else None
    context = {"docs_shell": shell, "console": console, "section": "docs", **api_example(request, tenant)}
    return render(request, "inference/docs.html", context)


@require_safe
def api_reference(request: HttpRequest) -> HttpResponse:
    console = last_console(request)
    context = {
        "docs_shell": "console.html" if console else "public.html",
        "console": console,
        "section": "docs",
        "groups": operation_rows(api_document.value),
        "structs": struct_rows(api_document.value),
    }
    return render(request, "inference/api_reference.html", context)


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
        "health": selectors.month_health(console.tenant),
        "limits": limit_gauges(console.principal(), console.tenant, recall_from_ledger),
        "alerts": selectors.recent_alerts(console.tenant),
        "requests": [(record, record.key_public_id and names.get(record.key_public_id)) for record in recent],
        **api_example(request, console.tenant),
    }
    return render(request, "inference/overview.html", context)
