"""The console's pages about API keys."""

from __future__ import annotations

from datetime import timedelta
from secrets import token_urlsafe
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from inference.key_forms import SCOPES, Choices, KeyForm, NewKeyForm
from inference.services.recall import recall_from_ledger
from tenants.client_address import client_address
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.models import ApiKey
from tenants.principal import Scope
from tenants.principal_selectors import find_stored_key
from tenants.quotas.gauges import limit_gauges
from tenants.selectors import ApiKeyNotFound, KeyPage, get_api_key, key_page
from tenants.services import (
    Actor,
    IssuedKey,
    RotationUnderway,
    change_api_key,
    issue_api_key,
    revoke_api_key,
    rotate_api_key,
    set_key_limits,
)

_OVERLAPS: Final = {"0": "at once", "1": "in an hour", "24": "in a day", "168": "in a week"}
"""Hours, as the form sends them."""


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def keys(request: HttpRequest, console: Console) -> HttpResponse:
    """The tenant's keys; a POST makes one, and its answer is the only page that ever shows the secret."""
    if request.method != "POST":
        return _keys_page(request, console)
    _require_key_manager(console)
    form = NewKeyForm(Choices.of(console.tenant), request.POST)
    if not form.is_valid():
        return _keys_page(request, console, form=form)
    try:
        with transaction.atomic():
            issued = issue_api_key(
                actor=_actor(request, console),
                tenant=console.tenant,
                scopes=form.cleaned_data["scopes"],
                expires_at=form.expires_at(timezone.now()),
                **form.bounds(),
            )
            set_key_limits(actor=_actor(request, console), api_key=issued.api_key, wanted=form.limits())
    except ValidationError as error:
        form.add_error(None, error.messages)
        return _keys_page(request, console, form=form)
    return _keys_page(request, console, issued=issued)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def key(request: HttpRequest, console: Console, key_id: UUID) -> HttpResponse:
    """One key: what it is bound to, what is left of each limit; a POST binds it anew."""
    api_key = _key_or_404(console, key_id)
    may_change = console.may_manage_keys and api_key.revoked_at is None
    if request.method == "POST" and not may_change:
        raise PermissionDenied
    form = None
    if may_change:
        form = KeyForm.of_key(api_key, Choices.of(console.tenant), request.POST or None)
    if request.method == "POST" and form is not None and form.is_valid():
        try:
            with transaction.atomic():
                actor = _actor(request, console)
                change_api_key(actor=actor, api_key=api_key, **form.bounds())
                set_key_limits(actor=actor, api_key=api_key, wanted=form.limits())
        except ValidationError as error:
            form.add_error(None, error.messages)
        else:
            messages.success(request, "Saved. It holds for every request from now on.")
            return redirect("key", console.tenant.public_id, key_id)
    stored = find_stored_key(api_key.lookup_id)
    context = {
        "console": console,
        "section": "keys",
        "key": api_key,
        "form": form,
        "now": timezone.now(),
        "scopes": [SCOPES.get(Scope(scope), scope) for scope in api_key.scopes],
        "limits": limit_gauges(stored.principal, console.tenant, recall_from_ledger) if stored else None,
    }
    return render(request, "tenants/key.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def revoke_key(request: HttpRequest, console: Console, key_id: UUID) -> HttpResponse:
    """Asks first, then revokes."""
    _require_key_manager(console)
    api_key = _key_or_404(console, key_id)
    if request.method == "POST":
        revoke_api_key(actor=_actor(request, console), api_key=api_key)
        messages.success(request, f"“{api_key.name}” is revoked. Requests with it are refused from now on.")
        return redirect("keys", console.tenant.public_id)
    question = Question(
        f"Revoke “{api_key.name}”?",
        f"Every program that uses {api_key.prefix}… is refused from the next request on. This cannot be undone; "
        "a new key can be made at any time.",
        "Revoke key",
    )
    back = reverse("keys", args=[console.tenant.public_id])
    return ask_first(request, console, question, section="keys", back=back)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def rotate_key(request: HttpRequest, console: Console, key_id: UUID) -> HttpResponse:
    """Asks first, then gives the key a new secret; its answer is the only page that ever shows it.

    The form carries the rotation's id: sent twice, it rotates once and shows the same secret.
    """
    _require_key_manager(console)
    api_key = _key_or_404(console, key_id)
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
    return _keys_page(request, console, issued=issued)


def _keys_page(
    request: HttpRequest, console: Console, *, form: NewKeyForm | None = None, issued: IssuedKey | None = None
) -> HttpResponse:
    asked = request.GET
    page: KeyPage = key_page(
        console.tenant,
        ended=asked.get("state") == "ended",
        search=asked.get("q", "").replace("\0", "")[:120].strip(),
        before=asked.get("before", ""),
    )
    if form is None and console.may_manage_keys:
        form = NewKeyForm(Choices.of(console.tenant))
    context: dict[str, Any] = {
        "console": console,
        "section": "keys",
        "page": page,
        "form": form,
        "now": timezone.now(),
    }
    if issued is not None:
        context |= {"issued": issued.api_key, "secret": issued.secret}
    in_place = "HX-Request" in request.headers
    return render(request, "tenants/keys_region.html" if in_place else "tenants/keys.html", context)


def _key_or_404(console: Console, key_id: UUID) -> ApiKey:
    try:
        return get_api_key(console.principal(), str(key_id))
    except ApiKeyNotFound:
        raise Http404 from None


def _require_key_manager(console: Console) -> None:
    if not console.may_manage_keys:
        raise PermissionDenied


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
