"""`/v1/webhooks`: where the tenant's alerts are sent; `/v1/alerts`: what it was told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.http import HttpResponse

from inference.api.actors import key_actor
from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.error_shapes import invalid_request
from inference.errors import NotFound
from inference.schemas.queries import AlertsQuery
from inference.schemas.webhooks import (
    AlertList,
    Deleted,
    DeliveryList,
    DeliveryObject,
    NewWebhook,
    SecretRotation,
    WebhookChange,
    WebhookList,
    WebhookObject,
    alert_object,
    delivery_object,
    webhook_object,
)
from inference.selectors import latest_alerts
from inference.services.webhooks import (
    WebhookNotFound,
    change_webhook,
    create_webhook,
    delete_webhook,
    get_webhook,
    list_webhooks,
    recent_deliveries,
    rotate_webhook_secret,
    try_webhook,
)
from tenants.models import Tenant
from tenants.principal import Scope

_P = ParamSpec("_P")


@endpoint("GET", scope=Scope.USAGE_READ, query=AlertsQuery, answer=AlertList)
async def alerts(call: ApiCall) -> HttpResponse:
    """What the tenant was told of its budgets and keys."""
    limit = call.query(AlertsQuery).limit
    rows = await sync_to_async(latest_alerts)(call.principal.tenant_id, limit=limit)
    return call.respond(AlertList([alert_object(row) for row in rows]))


@endpoint("GET", scope=Scope.ADMIN, answer=WebhookList)
async def _list(call: ApiCall) -> HttpResponse:
    """Where alerts are sent."""
    rows = await sync_to_async(list_webhooks)(call.principal.tenant_id)
    return call.respond(WebhookList([webhook_object(row) for row in rows]))


@endpoint("POST", scope=Scope.ADMIN, body=NewWebhook, answer=WebhookObject, status=201)
async def _create(call: ApiCall) -> HttpResponse:
    """Sends alerts to one more URL."""
    return call.respond(await _answered(_created, call, call.read(NewWebhook)), status=201)


@endpoint("GET", scope=Scope.ADMIN, answer=WebhookObject, errors=(404,))
async def _show(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """One of them."""
    return call.respond(await _answered(_shown, call, webhook_id))


@endpoint("POST", scope=Scope.ADMIN, body=WebhookChange, answer=WebhookObject, errors=(404,))
async def _change(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """Changes it, or switches it on or off."""
    return call.respond(await _answered(_changed, call, webhook_id, call.read(WebhookChange)))


@endpoint("DELETE", scope=Scope.ADMIN, answer=Deleted, errors=(404,))
async def _delete(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """Forgets it."""
    return call.respond(await _answered(_deleted, call, webhook_id))


webhooks = by_method(GET=_list, POST=_create)
webhook = by_method(GET=_show, POST=_change, DELETE=_delete)


@endpoint("POST", scope=Scope.ADMIN, body=SecretRotation, answer=WebhookObject, errors=(404,))
async def rotate_secret(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """A new secret to sign with."""
    return call.respond(await _answered(_rotated, call, webhook_id, call.read(SecretRotation)))


@endpoint("POST", scope=Scope.ADMIN, answer=DeliveryObject, status=202, errors=(404,))
async def test(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """Sends it an alert that is none."""
    return call.respond(await _answered(_tried, call, webhook_id), status=202)


@endpoint("GET", scope=Scope.ADMIN, answer=DeliveryList, errors=(404,))
async def deliveries(call: ApiCall, *, webhook_id: str) -> HttpResponse:
    """What was sent lately, and what came of it."""
    return call.respond(await _answered(_deliveries, call, webhook_id))


async def _answered(
    work: Callable[Concatenate[ApiCall, _P], Any], call: ApiCall, *args: _P.args, **kwargs: _P.kwargs
) -> Any:
    """Runs it in Django's thread, and says in the API's words what it refuses."""
    try:
        return await sync_to_async(work)(call, *args, **kwargs)
    except WebhookNotFound:
        raise NotFound(
            "There is no such webhook. GET /v1/webhooks lists yours.", code="webhook_not_found"
        ) from None
    except ValidationError as error:
        raise invalid_request(error) from None


def _created(call: ApiCall, asked: NewWebhook) -> Any:
    tenant = Tenant.objects.get(pk=call.principal.tenant_id)
    kinds = [kind.value for kind in asked.kinds]
    made = create_webhook(actor=key_actor(call), tenant=tenant, url=asked.url, kinds=kinds)
    return webhook_object(made, with_secret=True)


def _shown(call: ApiCall, webhook_id: str) -> Any:
    return webhook_object(get_webhook(call.principal.tenant_id, webhook_id))


def _changed(call: ApiCall, webhook_id: str, asked: WebhookChange) -> Any:
    found = get_webhook(call.principal.tenant_id, webhook_id)
    changed = change_webhook(
        actor=key_actor(call),
        endpoint=found,
        url=found.url if asked.url is None else asked.url,
        kinds=found.kinds if asked.kinds is None else [kind.value for kind in asked.kinds],
        is_enabled=found.disabled_at is None if asked.is_enabled is None else asked.is_enabled,
    )
    return webhook_object(changed)


def _deleted(call: ApiCall, webhook_id: str) -> Any:
    found = get_webhook(call.principal.tenant_id, webhook_id)
    delete_webhook(actor=key_actor(call), endpoint=found)
    return Deleted(id=str(found.public_id))


def _rotated(call: ApiCall, webhook_id: str, asked: SecretRotation) -> Any:
    found = get_webhook(call.principal.tenant_id, webhook_id)
    rotated = rotate_webhook_secret(
        actor=key_actor(call), endpoint=found, overlap=timedelta(seconds=asked.overlap_s)
    )
    return webhook_object(rotated, with_secret=True)


def _tried(call: ApiCall, webhook_id: str) -> Any:
    found = get_webhook(call.principal.tenant_id, webhook_id)
    return delivery_object(try_webhook(actor=key_actor(call), endpoint=found))


def _deliveries(call: ApiCall, webhook_id: str) -> Any:
    found = get_webhook(call.principal.tenant_id, webhook_id)
    return DeliveryList([delivery_object(row) for row in recent_deliveries(found)])
