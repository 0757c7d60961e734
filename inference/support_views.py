"""The operator's way into a tenant's console, and out of it."""

from __future__ import annotations

from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from tenants.admin.base import actor_of
from tenants.models import Tenant
from tenants.support import LASTS, begin_visit, end_visit


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def support(request: HttpRequest, tenant_id: UUID) -> HttpResponse:
    """Asks why, then opens the tenant's console."""
    _require_superuser(request)
    tenant = get_object_or_404(Tenant, public_id=tenant_id)
    if request.method == "POST":
        try:
            begin_visit(
                actor=actor_of(request),
                session=request.session,
                tenant=tenant,
                reason=request.POST.get("reason", ""),
            )
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
        else:
            return redirect("overview", tenant.public_id)
    context = {
        **admin.site.each_context(request),
        "title": f"Support: {tenant.name}",
        "tenant": tenant,
        "minutes": LASTS.seconds // 60,
    }
    return render(request, "admin/support.html", context)


@require_POST
def end_support(request: HttpRequest, tenant_id: UUID) -> HttpResponse:
    _require_superuser(request)
    tenant = get_object_or_404(Tenant, public_id=tenant_id)
    end_visit(actor=actor_of(request), session=request.session, tenant=tenant)
    return redirect("admin:tenants_tenant_change", tenant.pk)


def _require_superuser(request: HttpRequest) -> None:
    if not request.user.is_superuser:
        raise PermissionDenied
