"""The console's pages about API keys."""

from __future__ import annotations

from datetime import timedelta
from secrets import token_urlsafe
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from tenants.client_address import client_address
from tenants.console import Console, tenant_page
from tenants.forms import NewKeyForm
from tenants.selectors import ApiKeyNotFound, get_api_key, list_api_keys
from tenants.services import Actor, RotationUnderway, issue_api_key, revoke_api_key, rotate_api_key

_OVERLAPS: Final = {"0": "at once", "1": "in an hour", "24": "in a day", "168": "in a week"}
"""Hours, as the form sends them."""


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def keys(request: HttpRequest, console: Console) -> HttpResponse:
    """The tenant's keys; a POST makes one, and its answer is the only page that ever shows the secret."""
    if request.method != "POST":
        return _keys_page(request, console, form=NewKeyForm())
    _require_key_manager(console)
    form = NewKeyForm(request.POST)
    if not form.is_valid():
        return _keys_page(request, console, form=form)
    try:
        issued = issue_api_key(
            actor=_actor(request, console),
            tenant=console.tenant,
            name=form.cleaned_data["name"],
            expires_at=form.expires_at(timezone.now()),
        )
    except ValidationError as error:
        form.add_error(None, error)
        return _keys_page(request, console, form=form)
    return _keys_page(request, console, form=NewKeyForm(), issued=issued.api_key, secret=issued.secret)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def revoke_key(request: HttpRequest, console: Console, key_id: UUID) -> HttpResponse:
    """Asks first (a page, or a dialog where htmx asks for it), then revokes."""
    _require_key_manager(console)
    try:
        api_key = get_api_key(console.principal(), str(key_id))
    except ApiKeyNotFound:
        raise Http404 from None
    if request.method == "POST":
        revoke_api_key(actor=_actor(request, console), api_key=api_key)
        messages.success(request, f"“{api_key.name}” is revoked. Requests with it are refused from now on.")
        return redirect("keys", console.tenant.public_id)
    in_dialog = "HX-Request" in request.headers
    template = "tenants/revoke_key_form.html" if in_dialog else "tenants/revoke_key.html"
    return render(request, template, {"console": console, "section": "keys", "key": api_key})


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def rotate_key(request: HttpRequest, console: Console, key_id: UUID) -> HttpResponse:
    """Asks first, then gives the key a new secret; its answer is the only page that ever shows it.

    The form carries the rotation's id: sent twice, it rotates once and shows the same secret.
    """
    _require_key_manager(console)
    try:
        api_key = get_api_key(console.principal(), str(key_id))
    except ApiKeyNotFound:
        raise Http404 from None
    if request.method != "POST":
        in_dialog = "HX-Request" in request.headers
        template = "tenants/rotate_key_form.html" if in_dialog else "tenants/rotate_key.html"
        context = {
            "console": console,
            "section": "keys",
            "key": api_key,
            "rotation_id": token_urlsafe(32),
            "overlaps": _OVERLAPS,
        }
        return render(request, template, context)
    hours = request.POST.get("overlap_h", "")
    try:
        issued = rotate_api_key(
            actor=_actor(request, console),
            api_key=api_key,
            rotation_id=request.POST.get("rotation_id", ""),
            overlap=timedelta(hours=int(hours) if hours in _OVERLAPS else 24),
        )
    except (RotationUnderway, ValidationError) as error:
        reason = "; ".join(error.messages) if isinstance(error, ValidationError) else str(error)
        messages.error(request, f"“{api_key.name}” was not rotated: {reason}")
        return redirect("keys", console.tenant.public_id)
    return _keys_page(request, console, form=NewKeyForm(), issued=issued.api_key, secret=issued.secret)


def _keys_page(request: HttpRequest, console: Console, **context: Any) -> HttpResponse:
    in_place = "HX-Request" in request.headers
    return render(
        request,
        "tenants/keys_region.html" if in_place else "tenants/keys.html",
        {
            "console": console,
            "section": "keys",
            "keys": sorted(list_api_keys(console.principal()), key=lambda key: key.revoked_at is not None),
            "now": timezone.now(),
            **context,
        },
    )


def _require_key_manager(console: Console) -> None:
    if not console.may_manage_keys:
        raise PermissionDenied


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
