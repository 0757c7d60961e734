"""Requests and answers of key management."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tenants.models import ApiKey

_Names = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(min_length=1, max_length=100)
]
"""Who gives a list binds the key: none at all would leave it unbound."""


class NewKey(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=120)]
    scopes: Annotated[list[str], Meta(min_length=1, max_length=8)] = msgspec.field(
        default_factory=lambda: ["inference"]
    )
    expires_at: Annotated[int, Meta(ge=0, le=253_402_300_799)] | None = None
    """Unix time, seconds."""
    project: str | None = None
    """The id of one of the tenant's projects."""
    allowed_models: _Names = []
    allowed_networks: _Names = []
    waits_for_rate: bool = False
    """Over a rate its requests wait their turn, up to their deadline, instead of a 429."""
    max_tier: str | None = None
    """A tier's name: the key's requests go no better than that."""


class Rotation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rotation_id: Annotated[str, Meta(min_length=22, max_length=200)]
    """Random, one for each rotation; the same one again gives the same secret."""
    overlap_s: Annotated[int, Meta(ge=0, le=30 * 86_400)] = 86_400
    """How long the old secret goes on working."""


class KeyObject(msgspec.Struct, kw_only=True):
    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    project: str | None
    allowed_models: list[str]
    allowed_networks: list[str]
    max_tier: str | None
    waits_for_rate: bool
    previous_until: int | None
    """So long the secret before the last rotation goes on working."""
    object: str = "api_key"
    secret: str | msgspec.UnsetType = msgspec.UNSET
    """The whole key: only in the answer that made it."""


class KeyList(msgspec.Struct):
    data: list[KeyObject]
    object: str = "list"


def key_object(api_key: ApiKey, *, secret: str | None = None) -> KeyObject:
    """Costs no query for a key that `list_api_keys` or `get_api_key` read."""
    used = getattr(api_key, "use", None)
    return KeyObject(
        id=str(api_key.public_id),
        name=api_key.name,
        prefix=api_key.prefix,
        scopes=list(api_key.scopes),
        created_at=int(api_key.created_at.timestamp()),
        expires_at=_seconds(api_key.expires_at),
        revoked_at=_seconds(api_key.revoked_at),
        last_used_at=None if used is None else _seconds(used.last_used_at),
        project=None if api_key.project is None else str(api_key.project.public_id),
        allowed_models=list(api_key.allowed_models),
        allowed_networks=list(api_key.allowed_networks),
        max_tier=None if api_key.max_tier is None else api_key.max_tier.name,
        waits_for_rate=api_key.waits_for_rate,
        previous_until=_seconds(api_key.previous_until),
        secret=msgspec.UNSET if secret is None else secret,
    )


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
