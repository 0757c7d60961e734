"""A tenant's webhook endpoints: made, changed, given a new secret, tried, removed. Sending is webhook_delivery's."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.crypto import salted_hmac

from inference.guarded_http import Forbidden, refuse_forbidden
from inference.models import AlertKind, DeliveryState, WebhookDelivery, WebhookEndpoint
from tenants.models import Tenant
from tenants.services import Actor, record_audit

ENDPOINTS_MAX: Final = 10
_RESOLVE_S: Final = 2.0
OVERLAP_MAX: Final = timedelta(days=7)


class WebhookNotFound(Exception):
    """There is no such endpoint or delivery in this tenant: absent and another tenant's are the same."""


def secrets_of(endpoint: WebhookEndpoint, now: datetime | None = None) -> list[bytes]:
    """The keys that requests are signed with, the newest first: two while a rotation's overlap lasts."""
    serials = [endpoint.secret_serial]
    if endpoint.previous_until is not None and endpoint.previous_until > (now or timezone.now()):
        serials.append(endpoint.secret_serial - 1)
    return [_secret(endpoint.public_id, serial) for serial in serials]


def shown_secret(endpoint: WebhookEndpoint) -> str:
    """As Standard Webhooks writes them; the newest."""
    return "whsec_" + base64.b64encode(secrets_of(endpoint)[0]).decode()


def _secret(public_id: UUID, serial: int) -> bytes:
    # Made from the server's secret, not stored: a database dump signs nothing.
    return salted_hmac("weir.webhook", f"{public_id}\0{serial}", algorithm="sha256").digest()


def create_webhook(*, actor: Actor, tenant: Tenant, url: str, kinds: Iterable[str] = ()) -> WebhookEndpoint:
    """Raises django.core.exceptions.ValidationError when a value won't do."""
    url, doubt = _reachable(url)  # before any lock: a name may take its time
    with transaction.atomic():
        endpoint = _create(actor, tenant, url, kinds)
    endpoint.doubt = doubt
    return endpoint


def _create(actor: Actor, tenant: Tenant, url: str, kinds: Iterable[str]) -> WebhookEndpoint:
    Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)  # the count below holds until the commit
    if WebhookEndpoint.objects.for_tenant(tenant).count() >= ENDPOINTS_MAX:
        raise ValidationError({"url": f"A tenant has at most {ENDPOINTS_MAX} endpoints: delete one."})
    endpoint = WebhookEndpoint(tenant=tenant, url=url, kinds=sorted(set(kinds)), created_by=actor.label)
    _refuse_twice(endpoint)
    endpoint.full_clean()
    endpoint.save()
    record_audit(
        actor=actor, action="webhook.created", tenant=tenant, target=endpoint, after=_values(endpoint)
    )
    return endpoint


def change_webhook(
    *, actor: Actor, endpoint: WebhookEndpoint, url: str, kinds: Iterable[str], is_enabled: bool
) -> WebhookEndpoint:
    """Raises WebhookNotFound, and django.core.exceptions.ValidationError when a value won't do."""
    doubt = ""
    if url != endpoint.url:  # one that was taken before can still be switched off
        url, doubt = _reachable(url)
    with transaction.atomic():
        changed = _change(actor, endpoint, url, kinds, is_enabled)
    changed.doubt = doubt
    return changed


def _change(
    actor: Actor, endpoint: WebhookEndpoint, url: str, kinds: Iterable[str], is_enabled: bool
) -> WebhookEndpoint:
    locked = _locked(endpoint)
    before = _values(locked)
    locked.url, locked.kinds = url, sorted(set(kinds))
    if is_enabled:
        locked.disabled_at, locked.disabled_reason = None, ""
    elif locked.disabled_at is None:
        locked.disabled_at, locked.disabled_reason = timezone.now(), "switched off"
    _refuse_twice(locked)
    locked.full_clean()
    locked.save()
    if (after := _values(locked)) != before:
        record_audit(
            actor=actor,
            action="webhook.changed",
            tenant=locked.tenant,
            target=locked,
            before=before,
            after=after,
        )
    return locked


@transaction.atomic
def rotate_webhook_secret(
    *, actor: Actor, endpoint: WebhookEndpoint, overlap: timedelta = timedelta(days=1)
) -> WebhookEndpoint:
    """A new secret. Until the overlap ends, each request is signed with both.

    Raises WebhookNotFound; ValidationError while an earlier overlap lasts, as a third secret would cut it short.
    """
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise ValidationError({"overlap": f"An overlap lasts at most {OVERLAP_MAX.days} days."})
    now = timezone.now()
    locked = _locked(endpoint)
    if locked.previous_until is not None and locked.previous_until > now:
        raise ValidationError(
            f"It was rotated before: the earlier secret is in use until {locked.previous_until:%Y-%m-%d %H:%M} UTC. "
            "Rotate it then."
        )
    locked.secret_serial += 1
    locked.previous_until = now + overlap
    locked.save(update_fields=["secret_serial", "previous_until"])
    record_audit(
        actor=actor,
        action="webhook.secret_rotated",
        tenant=locked.tenant,
        target=locked,
        after={"previous_until": locked.previous_until},
    )
    return locked


@transaction.atomic
def delete_webhook(*, actor: Actor, endpoint: WebhookEndpoint) -> None:
    """Raises WebhookNotFound: of two who delete it, one finds it gone."""
    # Not locked before: who records a delivery has that row first, and then this one.
    _, deleted = WebhookEndpoint.objects.for_tenant(endpoint.tenant_id).filter(pk=endpoint.pk).delete()
    if not deleted.get(WebhookEndpoint._meta.label):
        raise WebhookNotFound(str(endpoint.public_id))
    record_audit(
        actor=actor,
        action="webhook.deleted",
        tenant=endpoint.tenant,
        target=endpoint,
        before=_values(endpoint),
    )


@transaction.atomic
def try_webhook(*, actor: Actor, endpoint: WebhookEndpoint) -> WebhookDelivery:
    """Queues a message that tells of nothing, to see whether it arrives. Raises WebhookNotFound."""
    _locked(endpoint)
    delivery = WebhookDelivery.objects.create(
        tenant=endpoint.tenant, endpoint=endpoint, due_at=timezone.now()
    )
    record_audit(actor=actor, action="webhook.tried", tenant=endpoint.tenant, target=endpoint)
    return delivery


@transaction.atomic
def redeliver(*, actor: Actor, delivery: WebhookDelivery) -> bool:
    """Sends what was given up once more, with all its attempts. False when it is not given up."""
    given_up = WebhookDelivery.objects.filter(
        tenant=delivery.tenant_id, pk=delivery.pk, state=DeliveryState.FAILED
    )
    changed = given_up.update(
        state=DeliveryState.WAITING, attempts=0, due_at=timezone.now(), finished_at=None
    )
    if changed:
        record_audit(actor=actor, action="webhook.redelivered", tenant=delivery.tenant, target=delivery)
    return bool(changed)


def _locked(endpoint: WebhookEndpoint) -> WebhookEndpoint:
    """Nobody else changes or deletes it until the transaction ends. Raises WebhookNotFound: somebody just did."""
    rows = WebhookEndpoint.objects.for_tenant(endpoint.tenant_id).select_for_update(no_key=True, of=("self",))
    found = rows.select_related("tenant").filter(pk=endpoint.pk).first()
    if found is None:
        raise WebhookNotFound(str(endpoint.public_id))
    return found


def _refuse_twice(endpoint: WebhookEndpoint) -> None:
    others = WebhookEndpoint.objects.for_tenant(endpoint.tenant_id).exclude(pk=endpoint.pk)
    if others.filter(url=endpoint.url).exists():
        raise ValidationError({"url": "Alerts go to this address already: change that endpoint."})


def list_webhooks(tenant_id: int) -> list[WebhookEndpoint]:
    return list(WebhookEndpoint.objects.for_tenant(tenant_id))


def get_webhook(tenant_id: int, public_id: str) -> WebhookEndpoint:
    """Raises WebhookNotFound."""
    try:
        rows = WebhookEndpoint.objects.for_tenant(tenant_id).select_related("tenant")
        return rows.get(public_id=UUID(public_id))
    except (ValueError, WebhookEndpoint.DoesNotExist):
        raise WebhookNotFound(public_id) from None


def get_delivery(tenant_id: int, public_id: str) -> WebhookDelivery:
    """Raises WebhookNotFound."""
    try:
        rows = WebhookDelivery.objects.for_tenant(tenant_id).select_related("tenant", "endpoint", "alert")
        return rows.get(public_id=UUID(public_id))
    except (ValueError, WebhookDelivery.DoesNotExist):
        raise WebhookNotFound(public_id) from None


def last_attempts(tenant_id: int) -> dict[int, WebhookDelivery]:
    """By endpoint, the newest delivery that was tried."""
    tried = WebhookDelivery.objects.for_tenant(tenant_id).exclude(log=[])
    newest = tried.order_by("endpoint_id", "-id").distinct("endpoint_id")
    return {delivery.endpoint_id: delivery for delivery in newest}


def recent_deliveries(endpoint: WebhookEndpoint, *, limit: int = 50) -> list[WebhookDelivery]:
    """The delivery log, newest first, each with its alert."""
    rows = WebhookDelivery.objects.filter(tenant=endpoint.tenant_id, endpoint=endpoint)
    return list(rows.select_related("alert")[:limit])


def _reachable(url: str) -> tuple[str, str]:
    """One to which something may be sent, and why nothing would arrive now. What is behind a name is judged again at
    each delivery: it may not be there yet, or not be known to this host, so that alone refuses nothing."""
    url = _checked(url)
    try:
        return url, refuse_forbidden(url, timeout_s=_RESOLVE_S, allowed=settings.WEBHOOK_NETWORKS)
    except Forbidden as error:
        raise ValidationError({"url": f"Nothing could be sent there: {error}."}) from None


def _checked(url: str) -> str:
    """What can be told from the text alone."""
    url = url.strip()
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValidationError(
            {"url": "The square brackets must hold an IPv6 address: https://[2001:db8::1]/weir."}
        ) from None
    schemes = {"https", "http"} if settings.WEBHOOK_NETWORKS else {"https"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ValidationError({"url": "An address such as https://example.com/weir is wanted."})
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValidationError({"url": "Only printable ASCII, please; escape the rest."})
    if parts.username is not None or parts.password is not None:
        raise ValidationError(
            {"url": "Leave out the user and password before the @: the signature says who asks."}
        )
    if parts.fragment:
        raise ValidationError({"url": "Leave out what begins with #: it would not be sent."})
    if parts.netloc.count(":") > 1 and "[" not in parts.netloc:
        raise ValidationError({"url": "Put an IPv6 address in square brackets: https://[2001:db8::1]/weir."})
    if not _has_usable_port(parts):
        raise ValidationError({"url": "The port must be a number from 1 to 65535; without one it is 443."})
    return url


def _has_usable_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _values(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "url": endpoint.url,
        "kinds": list(endpoint.kinds) or [str(kind) for kind in AlertKind],
        "is_enabled": endpoint.disabled_at is None,
    }
