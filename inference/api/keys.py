"""`/v1/keys`: a tenant's API keys, for keys with the scope `keys:write`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.http import HttpResponse

from engine_worker.broker import BrokerUnavailable
from inference.api.actors import key_actor
from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.error_shapes import invalid_request
from inference.errors import Conflict, InvalidRequest, NotAllowed, NotFound
from inference.schemas.keys import KeyList, KeyObject, NewKey, Rotation, key_object
from tenants.models import ApiKey, Tenant, Tier
from tenants.principal import Principal, Scope
from tenants.selectors import ApiKeyNotFound, ProjectNotFound, get_api_key, get_project, list_api_keys
from tenants.services import RotationUnderway, issue_api_key, revoke_api_key, rotate_api_key

_P = ParamSpec("_P")
_NAMES_TOLD: Final = 50


@endpoint("GET", scope=Scope.KEYS_WRITE, answer=KeyList)
async def _list(call: ApiCall) -> HttpResponse:
    """The tenant's keys."""
    rows = await sync_to_async(list_api_keys)(call.principal)
    return call.respond(KeyList([key_object(row) for row in rows]))


@endpoint("POST", scope=Scope.KEYS_WRITE, body=NewKey, answer=KeyObject, status=201)
async def _issue(call: ApiCall) -> HttpResponse:
    """A new key, its secret told once."""
    asked = call.read(NewKey)
    await _refuse_unknown_models(call, asked.allowed_models)
    return call.respond(await _answered(_issued, call, asked), status=201)


keys = by_method(GET=_list, POST=_issue)


@endpoint("POST", scope=Scope.KEYS_WRITE, body=Rotation, answer=KeyObject, errors=(404,))
async def rotate(call: ApiCall, *, key_id: str) -> HttpResponse:
    """A new secret for a key; the old one goes on for a while."""
    asked = call.read(Rotation)
    return call.respond(await _answered(_rotated, call, key_id, asked))


@endpoint("POST", scope=Scope.KEYS_WRITE, answer=KeyObject, errors=(404,))
async def revoke(call: ApiCall, *, key_id: str) -> HttpResponse:
    """Ends a key, on every gateway within a second."""
    return call.respond(await _answered(_revoked, call, key_id))


async def _refuse_unknown_models(call: ApiCall, names: list[str]) -> None:
    """A misspelt one would be a key that may use nothing. Raises InvalidRequest."""
    if not names:
        return
    try:
        known = await call.runtime.models.known_names(call.principal.tenant_public_id)
    except BrokerUnavailable:
        return  # keys can be made while the queue is away, as they can be revoked
    if unknown := next((name for name in names if name not in known), None):
        nearest = get_close_matches(unknown, known, n=_NAMES_TOLD, cutoff=0.0)
        raise InvalidRequest(
            f"There is no model '{unknown}'. There are: {', '.join(nearest) or 'none yet'}.",
            param="allowed_models",
        )


def no_such_key() -> NotFound:
    return NotFound("There is no such key. GET /v1/keys lists yours.", code="key_not_found")


async def _answered(
    work: Callable[Concatenate[ApiCall, _P], Any], call: ApiCall, *args: _P.args, **kwargs: _P.kwargs
) -> Any:
    """Runs it in Django's thread, and says in the API's words what it refuses."""
    try:
        return await sync_to_async(partial(work, call, *args, **kwargs))()
    except ApiKeyNotFound:
        raise no_such_key() from None
    except ProjectNotFound:
        raise InvalidRequest(
            "There is no such project. GET /v1/organization/projects lists yours.", param="project"
        ) from None
    except RotationUnderway as error:
        raise Conflict(
            f"The key was rotated before, and its earlier secret works until {error.until:%Y-%m-%d %H:%M} UTC. Rotate "
            "it then, or make another key.",
            code="rotation_underway",
        ) from None
    except ValidationError as error:
        raise invalid_request(error) from None


def _issued(call: ApiCall, asked: NewKey) -> Any:
    principal = call.principal
    if principal.is_restricted:
        raise NotAllowed(
            "This key is bound to models, networks, a tier or limits of its own, and a key that it made would not be: "
            "use one that is not bound.",
            code="insufficient_permissions",
        )
    scopes = _scopes(principal, asked.scopes)
    max_tier = None
    if asked.max_tier is not None:
        max_tier = Tier.objects.filter(name=asked.max_tier).first()
        if max_tier is None:
            names = ", ".join(Tier.objects.order_by("rank").values_list("name", flat=True))
            raise InvalidRequest(
                f"There is no tier '{asked.max_tier[:40]}'. There are: {names}.", param="max_tier"
            )
    expires_at = None if asked.expires_at is None else datetime.fromtimestamp(asked.expires_at, tz=UTC)
    _refuse_longer_lived(call, expires_at)
    issued = issue_api_key(
        actor=key_actor(call),
        tenant=Tenant.objects.get(pk=principal.tenant_id),
        name=asked.name,
        scopes=scopes,
        expires_at=expires_at,
        project=None if asked.project is None else get_project(principal, asked.project),
        allowed_models=asked.allowed_models,
        allowed_networks=asked.allowed_networks,
        max_tier=max_tier,
        waits_for_rate=asked.waits_for_rate,
    )
    return key_object(issued.api_key, secret=issued.secret)


def _rotated(call: ApiCall, key_id: str, asked: Rotation) -> Any:
    api_key = get_api_key(call.principal, key_id)
    _refuse_greater(call, api_key)
    issued = rotate_api_key(
        actor=key_actor(call),
        api_key=api_key,
        rotation_id=asked.rotation_id,
        overlap=timedelta(seconds=asked.overlap_s),
    )
    return key_object(issued.api_key, secret=issued.secret)


def _revoked(call: ApiCall, key_id: str) -> Any:
    api_key = get_api_key(call.principal, key_id)
    revoke_api_key(actor=key_actor(call), api_key=api_key)
    return key_object(get_api_key(call.principal, key_id))


def _scopes(principal: Principal, asked: list[str]) -> list[Scope]:
    try:
        scopes = [Scope(scope) for scope in asked]
    except ValueError:
        raise InvalidRequest(f"'scopes' must be among {', '.join(Scope)}.", param="scopes") from None
    if missing := [scope for scope in scopes if scope not in principal.scopes]:
        raise NotAllowed(
            f"This key can't give what it lacks: {', '.join(missing)}. Use one that has it, or leave it out.",
            code="insufficient_permissions",
        )
    return scopes


def _refuse_greater(call: ApiCall, api_key: ApiKey) -> None:
    """Who rotates a key holds its new secret: it must not be able to do more than the one that asks."""
    principal = call.principal
    _scopes(principal, list(api_key.scopes))
    if str(api_key.public_id) == principal.key_public_id:
        return
    if principal.is_restricted:
        raise NotAllowed(
            "This key is bound, and can rotate none but itself: use one that is not.",
            code="insufficient_permissions",
        )
    _refuse_longer_lived(call, api_key.expires_at)


def _refuse_longer_lived(call: ApiCall, expires_at: datetime | None) -> None:
    """An expiry would mean nothing if the key could leave another behind. Takes a query."""
    assert call.principal.key_public_id is not None
    own = get_api_key(call.principal, call.principal.key_public_id).expires_at
    if own is not None and (expires_at is None or expires_at > own):
        raise NotAllowed(
            f"This key ends at {int(own.timestamp())}, and can't make or rotate one that works longer: give no later "
            "'expires_at'.",
            code="insufficient_permissions",
        )
