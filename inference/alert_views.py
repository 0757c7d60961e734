"""The console's pages about alerts: what the tenant was told, and the webhooks that are told it too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from inference.models import AlertKind, WebhookEndpoint
from inference.selectors import latest_alerts
from inference.services.webhook_delivery import ATTEMPTS_MAX
from inference.services.webhooks import (
    ENDPOINTS_MAX,
    WebhookNotFound,
    change_webhook,
    create_webhook,
    delete_webhook,
    get_delivery,
    get_webhook,
    last_attempts,
    list_webhooks,
    recent_deliveries,
    redeliver,
    rotate_webhook_secret,
    shown_secret,
    try_webhook,
)
from tenants.client_address import client_address
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.services import Actor

_SHOWN: Final = 100
_SOON: Final = timedelta(minutes=5)
"""What is due by then, or is being sent, the page waits for."""


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def alerts(request: HttpRequest, console: Console) -> HttpResponse:
    """The latest; a POST makes a webhook."""
    url, kinds, refusal = "", [], ""
    if request.method == "POST":
        _require_administrator(console)
        url = request.POST.get("url", "").strip()
        kinds = [kind for kind in request.POST.getlist("kinds") if kind in AlertKind.values]
        try:
            made = create_webhook(actor=_actor(request, console), tenant=console.tenant, url=url, kinds=kinds)
        except ValidationError as error:
            refusal = " ".join(error.messages)
        else:
            return _made(request, console, made)
    webhooks = list_webhooks(console.tenant.pk) if console.may_administer else []
    attempts = last_attempts(console.tenant.pk) if webhooks else {}
    context: dict[str, Any] = {
        "console": console,
        "section": "alerts",
        "alerts": latest_alerts(console.tenant.pk, limit=_SHOWN),
        "asked": {"url": url, "kinds": kinds, "refusal": refusal},
        "kinds": AlertKind.choices,
        "webhooks": [(endpoint, attempts.get(endpoint.pk)) for endpoint in webhooks],
        "webhooks_max": ENDPOINTS_MAX,
    }
    return render(request, "inference/alerts.html", context)


def _made(request: HttpRequest, console: Console, endpoint: WebhookEndpoint) -> HttpResponse:
    if endpoint.doubt:
        messages.warning(
            request,
            f"It is saved, but nothing would arrive there now: {endpoint.doubt}. Is the address right?",
        )
    else:
        messages.success(
            request, "Alerts go there from now on. Give its program the secret, then send a test."
        )
    return redirect("webhook", console.tenant.public_id, endpoint.public_id)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def webhook(request: HttpRequest, console: Console, webhook_id: UUID) -> HttpResponse:
    """One endpoint with its secret and what became of each delivery; `verb` says what is done to it."""
    _require_administrator(console)
    try:
        endpoint = get_webhook(console.tenant.pk, str(webhook_id))
    except WebhookNotFound:
        raise Http404 from None
    if request.method != "POST" and request.GET.get("verb") == "delete":
        question = Question(
            "Delete this webhook?",
            f"{endpoint.url} is told nothing more, and its secret and the list of its deliveries go. "
            "This cannot be undone; it can be added again, with a new secret.",
            "Delete webhook",
            fields={"verb": "delete"},
        )
        back = reverse("webhook", args=[console.tenant.public_id, endpoint.public_id])
        return ask_first(request, console, question, section="alerts", back=back)
    if request.method != "POST":
        deliveries, soon = recent_deliveries(endpoint), timezone.now() + _SOON
        context: dict[str, Any] = {
            "console": console,
            "section": "alerts",
            "webhook": endpoint,
            "secret": shown_secret(endpoint),
            "deliveries": deliveries,
            "attempts_max": ATTEMPTS_MAX,
            "is_sending": endpoint.disabled_at is None
            and any(each.finished_at is None and each.due_at < soon for each in deliveries),
            "kinds": [AlertKind(kind).label for kind in endpoint.kinds],
        }
        return render(request, "inference/webhook.html", context)
    actor, verb = _actor(request, console), request.POST.get("verb", "")
    try:
        if verb == "delete":
            delete_webhook(actor=actor, endpoint=endpoint)
            messages.success(request, "The webhook is deleted.")
            return redirect("alerts", console.tenant.public_id)
        if verb == "try":
            try_webhook(actor=actor, endpoint=endpoint)
            messages.success(request, "A test is on its way: below is what becomes of it.")
        elif verb == "redeliver":
            delivery = get_delivery(console.tenant.pk, request.POST.get("delivery", ""))
            if redeliver(actor=actor, delivery=delivery):
                messages.success(request, "It is sent again: below is what becomes of it.")
        elif verb == "rotate":
            rotate_webhook_secret(actor=actor, endpoint=endpoint)
            messages.success(request, "It has a new secret. For a day each message is signed with both.")
        elif verb in ("enable", "disable"):
            is_enabled = verb == "enable"
            change_webhook(
                actor=actor,
                endpoint=endpoint,
                url=endpoint.url,
                kinds=endpoint.kinds,
                is_enabled=is_enabled,
            )
            messages.success(request, "It is told again." if is_enabled else "It is told nothing more.")
        else:
            raise Http404
    except WebhookNotFound:  # it was deleted at this moment
        raise Http404 from None
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    return redirect("webhook", console.tenant.public_id, endpoint.public_id)


def _require_administrator(console: Console) -> None:
    if not console.may_administer:
        raise PermissionDenied


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
