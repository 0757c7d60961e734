"""The console's pages for owners: a copy of the tenant's data, and its deletion."""

from __future__ import annotations

from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from tenants.client_address import client_address
from tenants.console import Console, tenant_page
from tenants.services import Actor
from tenants.services.data_copies import ask_for_copy, fetch_copy, list_copies
from tenants.services.deletion import restore_tenant, schedule_deletion


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def deletion(request: HttpRequest, console: Console) -> HttpResponse:
    """A POST with the tenant's short name deletes after the days of grace; with `restore` it takes that back."""
    if not console.may_delete_tenant:
        raise PermissionDenied
    actor = Actor.person(console.user, ip_address=client_address(request))
    error = ""
    if request.method == "POST":
        if "restore" in request.POST:
            restore_tenant(actor=actor, tenant=console.tenant)
            messages.success(request, f"{console.tenant.name} stays.")
            return redirect("deletion", console.tenant.public_id)
        if request.POST.get("slug", "").strip() == console.tenant.slug:
            schedule_deletion(actor=actor, tenant=console.tenant)
            return redirect("deletion", console.tenant.public_id)
        error = f"Type {console.tenant.slug} to say that you mean it."
    context = {"console": console, "section": "members", "days": settings.DELETION_GRACE_DAYS, "error": error}
    return render(request, "tenants/deletion.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def data(request: HttpRequest, console: Console) -> HttpResponse:
    """Copies of the tenant's data; a POST asks for one."""
    if not console.may_export_data:
        raise PermissionDenied
    if request.method == "POST":
        actor = Actor.person(console.user, ip_address=client_address(request))
        ask_for_copy(actor=actor, tenant=console.tenant)
        return redirect("data_copies", console.tenant.public_id)
    context = {"console": console, "section": "members", "copies": list_copies(console.tenant)}
    return render(request, "tenants/data_copies.html", context)


@require_safe
@tenant_page
def data_file(request: HttpRequest, console: Console, copy_id: UUID) -> HttpResponse:
    if not console.may_export_data:
        raise PermissionDenied
    actor = Actor.person(console.user, ip_address=client_address(request))
    content = fetch_copy(actor=actor, tenant=console.tenant, public_id=copy_id)
    if content is None:
        raise Http404
    response = HttpResponse(content, content_type="application/zip")
    response.headers["Content-Disposition"] = f'attachment; filename="{console.tenant.slug}-data.zip"'
    return response
