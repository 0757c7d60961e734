"""Alerts to webhooks: queued once each, signed, sent until somebody takes them or the attempts are used up.

As https://www.standardwebhooks.com has it: `webhook-id`, `webhook-timestamp` and `webhook-signature`, which is
HMAC-SHA256 over `id.timestamp.body`. An attempt that died on the way is made again, under the same id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from inference.guarded_http import Forbidden, Unreachable, post
from inference.models import Alert, DeliveryState, WebhookDelivery, WebhookEndpoint
from inference.services.webhooks import secrets_of

log = structlog.get_logger(__name__)

RETRY_AFTER: Final = (10, 60, 300, 1800, 7200, 21_600, 43_200)
"""Seconds after each attempt but the last: a day in all."""
ATTEMPTS_MAX: Final = len(RETRY_AFTER) + 1
_TIMEOUT_S: Final = 10.0
_ABANDONED: Final = timedelta(minutes=5)
"""Longer than its task may run: who took it is dead."""
_ALERTS_OF: Final = timedelta(days=2)
_KEPT: Final = timedelta(days=30)
_PER_CALL: Final = 100
_BUDGET_S: Final = 40.0


@dataclass(frozen=True, slots=True)
class Attempt:
    status: int | None
    error: str = ""

    @property
    def has_arrived(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def queue_deliveries(now: datetime | None = None) -> int:
    """A delivery for every alert and endpoint that wants it; each pair once, however often this runs."""
    now = now or timezone.now()
    queued = 0
    for endpoint in WebhookEndpoint.unscoped.filter(disabled_at=None).select_related("tenant").iterator(200):
        since = max(endpoint.created_at, now - _ALERTS_OF)
        alerts = Alert.objects.filter(tenant=endpoint.tenant, created_at__gte=since)
        if endpoint.kinds:
            alerts = alerts.filter(kind__in=endpoint.kinds)
        missing = alerts.exclude(deliveries__endpoint=endpoint).order_by("id")
        rows = [
            WebhookDelivery(tenant=endpoint.tenant, endpoint=endpoint, alert=alert, due_at=now)
            for alert in missing
        ]
        WebhookDelivery.objects.bulk_create(rows, ignore_conflicts=True)
        queued += len(rows)
    return queued


def send_deliveries(now: datetime | None = None) -> int:
    """Sends what is due, and forgets what has been over for a month; any number may run at once. Returns how many
    arrived."""
    WebhookDelivery.unscoped.filter(finished_at__lt=(now or timezone.now()) - _KEPT).delete()
    arrived, ends_at = 0, time.monotonic() + _BUDGET_S
    for _ in range(_PER_CALL):
        delivery = _claim(now or timezone.now())
        if delivery is None or time.monotonic() > ends_at:
            break
        began = time.monotonic()
        attempt = _send(delivery)
        arrived += attempt.has_arrived
        _record(
            delivery, attempt, took_ms=round((time.monotonic() - began) * 1000), now=now or timezone.now()
        )
    return arrived


@transaction.atomic
def _claim(now: datetime) -> WebhookDelivery | None:
    due = WebhookDelivery.unscoped.select_for_update(skip_locked=True, of=("self",)).select_related(
        "tenant", "endpoint", "alert"
    )
    delivery = (
        due.filter(state=DeliveryState.WAITING, due_at__lte=now, endpoint__disabled_at=None)
        .order_by("due_at", "id")
        .first()
    )
    if delivery is not None:
        delivery.due_at = now + _ABANDONED
        delivery.attempts += 1
        delivery.save(update_fields=["due_at", "attempts"])
    return delivery


def _send(delivery: WebhookDelivery) -> Attempt:
    body = message(delivery)
    headers = [
        ("content-type", "application/json"),
        ("user-agent", "Weir-Webhooks/1"),
        *signed_headers(delivery, body, at=int(time.time())),
    ]
    try:
        status = post(
            delivery.endpoint.url,
            headers=headers,
            content=body,
            timeout_s=_TIMEOUT_S,
            allowed=settings.WEBHOOK_NETWORKS,
        )
    except Forbidden as error:
        # What stands behind a forbidden address is not told: not even whether something does.
        return Attempt(None, f"not sent: {error}"[:200])
    except Unreachable as error:
        return Attempt(None, str(error)[:200])
    return Attempt(status)


def message(delivery: WebhookDelivery) -> bytes:
    """The body: the same at each attempt, since it is signed."""
    alert, tenant = delivery.alert, delivery.tenant
    data: dict[str, object] = {"tenant": {"id": str(tenant.public_id), "name": tenant.name}}
    if alert is not None:
        data |= {
            "id": str(alert.public_id),
            "kind": alert.kind,
            "subject": alert.subject,
            "period": alert.period,
            "threshold": alert.threshold,
            "title": alert.title,
            "text": alert.text,
            "url": f"{settings.BASE_URL}/t/{tenant.public_id}/",
        }
    at = delivery.created_at if alert is None else alert.created_at
    kind = "webhook.test" if alert is None else f"alert.{alert.kind}"
    return msgspec.json.encode({"type": kind, "timestamp": at.isoformat(), "data": data})


def signed_headers(delivery: WebhookDelivery, body: bytes, *, at: int) -> list[tuple[str, str]]:
    """Standard Webhooks' three; one signature for each secret that holds."""
    signed = f"{delivery.public_id}.{at}.".encode() + body
    signatures = [
        "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
        for secret in secrets_of(delivery.endpoint)
    ]
    return [
        ("webhook-id", str(delivery.public_id)),
        ("webhook-timestamp", str(at)),
        ("webhook-signature", " ".join(signatures)),
    ]


@transaction.atomic
def _record(delivery: WebhookDelivery, attempt: Attempt, *, took_ms: int, now: datetime) -> None:
    # Only the attempt that was claimed: one that was taken for dead, and has been made again, changes nothing.
    mine = WebhookDelivery.objects.filter(
        tenant=delivery.tenant, pk=delivery.pk, state=DeliveryState.WAITING, due_at=delivery.due_at
    )
    entry = {
        "at": now.isoformat(timespec="seconds"),
        "status": attempt.status,
        "error": attempt.error,
        "took_ms": took_ms,
    }
    values: dict[str, object] = {"log": [*delivery.log, entry][-20:]}
    if attempt.has_arrived:
        values |= {"state": DeliveryState.DELIVERED, "finished_at": now}
    elif attempt.status == 410 or delivery.attempts >= ATTEMPTS_MAX:
        values |= {"state": DeliveryState.FAILED, "finished_at": now}
    else:
        values["due_at"] = now + timedelta(seconds=RETRY_AFTER[delivery.attempts - 1])
    if mine.update(**values) and attempt.status == 410:
        # Gone: whoever answers so wants no more of it.
        WebhookEndpoint.objects.filter(
            tenant=delivery.tenant, pk=delivery.endpoint_id, disabled_at=None
        ).update(disabled_at=now, disabled_reason="it answered 410 Gone")
    if not attempt.has_arrived:
        log.warning(
            "webhook_not_delivered",
            delivery=str(delivery.public_id),
            tenant=str(delivery.tenant.public_id),
            status=attempt.status,
            attempt=delivery.attempts,
        )
