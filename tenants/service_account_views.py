"""The console's page of service accounts."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from tenants.client_address import client_address
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.members import get_service_account, list_service_accounts
from tenants.models import ServiceAccount
from tenants.services import Actor
from tenants.services.service_accounts import (
    create_service_account,
    issue_service_key,
    retire_service_account,
)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def service_accounts(request: HttpRequest, console: Console) -> HttpResponse:
    """The tenant's service accounts; a POST makes one."""
    if request.method != "POST":
        return _page(request, console)
    _require_manager(console)
    name = request.POST.get("name", "")
    try:
        account = create_service_account(actor=_actor(request, console), tenant=console.tenant, name=name)
    except ValidationError as error:
        return _page(request, console, name=name, error=" ".join(error.messages))
    messages.success(request, f"“{account.name}” is there. Give it a key.")
    return redirect("service_accounts", console.tenant.public_id)


@require_POST
@tenant_page
def service_key(request: HttpRequest, console: Console, account_id: UUID) -> HttpResponse:
    """A key for it; the answer is the only page that ever shows the secret."""
    account = _account(console, account_id)
    _require_manager(console)
    try:
        issued = issue_service_key(actor=_actor(request, console), account=account, name=account.name)
    except ValidationError as error:
        return _page(request, console, error=" ".join(error.messages))
    return _page(request, console, issued=issued.api_key, secret=issued.secret)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def retire(request: HttpRequest, console: Console, account_id: UUID) -> HttpResponse:
    """Asks first, then retires it and revokes its keys."""
    account = _account(console, account_id)
    _require_manager(console)
    if request.method != "POST":
        question = Question(
            f"Retire “{account.name}”?",
            "All its keys are revoked: every program that uses one is refused from the next request on. "
            "This cannot be undone.",
            "Retire and revoke its keys",
        )
        back = reverse("service_accounts", args=[console.tenant.public_id])
        return ask_first(request, console, question, section="members", back=back)
    if retire_service_account(actor=_actor(request, console), account=account):
        messages.success(request, f"“{account.name}” is retired, and its keys are revoked.")
    return redirect("service_accounts", console.tenant.public_id)


def _page(request: HttpRequest, console: Console, **more: Any) -> HttpResponse:
    context = {
        "console": console,
        "section": "members",
        "accounts": list_service_accounts(console.tenant),
        **more,
    }
    return render(request, "tenants/service_accounts.html", context)


def _account(console: Console, account_id: UUID) -> ServiceAccount:
    account = get_service_account(console.tenant, account_id)
    if account is None:
        raise Http404
    return account


def _require_manager(console: Console) -> None:
    if not console.may_manage_keys:
        raise PermissionDenied


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
