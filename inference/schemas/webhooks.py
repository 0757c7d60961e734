"""Requests and answers of webhooks and alerts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inference.models import Alert, AlertKind, WebhookDelivery, WebhookEndpoint
from inference.services.webhooks import shown_secret

_Kinds = Annotated[list[AlertKind], Meta(max_length=8)]


class NewWebhook(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    url: Annotated[str, Meta(min_length=1, max_length=1000)]
    kinds: _Kinds = []
    """Empty is all."""


class WebhookChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    url: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    kinds: _Kinds | None = None
    is_enabled: bool | None = None


class SecretRotation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    overlap_s: Annotated[int, Meta(ge=0, le=7 * 86_400)] = 86_400
    """So long requests are signed with both secrets."""


class WebhookObject(msgspec.Struct, kw_only=True):
    id: str
    url: str
    kinds: list[str]
    is_enabled: bool
    disabled_reason: str
    created_at: int
    previous_until: int | None
    """So long requests are signed with the secret before the last rotation too."""
    warning: str | None = None
    """In the answer to its URL: why nothing would arrive there at the moment. Null: nothing speaks against it."""
    object: str = "webhook"
    secret: str | msgspec.UnsetType = msgspec.UNSET
    """For Standard Webhooks' libraries: in the answers that made it and no other."""


class WebhookList(msgspec.Struct):
    data: list[WebhookObject]
    object: str = "list"


class DeliveryObject(msgspec.Struct, kw_only=True):
    id: str
    """The `webhook-id` of its requests."""
    alert: str | None
    """Null of a trial."""
    state: str
    """`waiting`, `delivered`, or `failed`: given up."""
    attempts: int
    next_attempt_at: int | None
    log: list[dict[str, Any]]
    """An object an attempt: `at`, `status`, `error`, `took_ms`."""
    created_at: int
    object: str = "webhook.delivery"


class DeliveryList(msgspec.Struct):
    data: list[DeliveryObject]
    object: str = "list"


class AlertObject(msgspec.Struct, kw_only=True):
    id: str
    kind: str
    subject: str
    period: str
    threshold: int
    title: str
    text: str
    created_at: int
    object: str = "alert"


class AlertList(msgspec.Struct):
    data: list[AlertObject]
    object: str = "list"


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "webhook.deleted"
    deleted: bool = True


def webhook_object(endpoint: WebhookEndpoint, *, with_secret: bool = False) -> WebhookObject:
    return WebhookObject(
        id=str(endpoint.public_id),
        url=endpoint.url,
        kinds=list(endpoint.kinds),
        is_enabled=endpoint.disabled_at is None,
        disabled_reason=endpoint.disabled_reason,
        created_at=int(endpoint.created_at.timestamp()),
        previous_until=None if endpoint.previous_until is None else int(endpoint.previous_until.timestamp()),
        warning=endpoint.doubt or None,
        secret=shown_secret(endpoint) if with_secret else msgspec.UNSET,
    )


def delivery_object(delivery: WebhookDelivery) -> DeliveryObject:
    return DeliveryObject(
        id=str(delivery.public_id),
        alert=None if delivery.alert is None else str(delivery.alert.public_id),
        state=delivery.state,
        attempts=delivery.attempts,
        next_attempt_at=int(delivery.due_at.timestamp()) if delivery.finished_at is None else None,
        log=list(delivery.log),
        created_at=int(delivery.created_at.timestamp()),
    )


def alert_object(alert: Alert) -> AlertObject:
    return AlertObject(
        id=str(alert.public_id),
        kind=alert.kind,
        subject=alert.subject,
        period=alert.period,
        threshold=alert.threshold,
        title=alert.title,
        text=alert.text,
        created_at=int(alert.created_at.timestamp()),
    )
