"""The console's page on which an owner deletes the tenant, or takes that back."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from tenants.client_address import client_address
from tenants.console import Console, tenant_page
from tenants.services import Actor
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
