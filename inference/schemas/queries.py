"""Query parameters, as structs: what is checked is what the OpenAPI document says."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class PageQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    """The id of the last object of the page before."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 20
    order: Literal["asc", "desc"] = "desc"


class FilesQuery(PageQuery, kw_only=True):
    purpose: str | None = None


class ItemsQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class StreamQuery(msgspec.Struct, kw_only=True):
    """How the stream was asked for in the first place."""

    include_usage: bool = False
    logprobs: bool = False
    last_event_id: str | None = None
    """For clients that can't send the header."""


class UsageQuery(msgspec.Struct, kw_only=True):
    start: str | None = None
    """A date, a time of ISO 8601, or Unix seconds."""
    end: str | None = None
    """Not included."""
    bucket_width: Literal["1d", "1h"] = "1d"
    group_by: str | None = None
    """Names of filters, with commas."""
    project: list[str] = []
    key: list[str] = []
    model: list[str] = []
    tier: list[str] = []
    finish_reason: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    page: str | None = None
    """`next_page` of the page before."""


class AuditQuery(msgspec.Struct, kw_only=True):
    """What is looked for in the audit log."""

    q: Annotated[str, Meta(max_length=200)] = ""
    """Anywhere in the actor, the action, the target or the address."""
    action: Annotated[str, Meta(max_length=64)] = ""
    """`key.revoked`, or `key.` for all that begins so."""
    actor: Annotated[str, Meta(max_length=254)] = ""
    target: str | None = None
    """The id of what was changed."""
    start: str | None = None
    """A date, a time of ISO 8601, or Unix seconds."""
    end: str | None = None
    """Not included."""


class AuditPageQuery(AuditQuery, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    page: str | None = None
    """`next_page` of the page before."""


class StatementQuery(msgspec.Struct, kw_only=True):
    month: str
    """`2026-11`."""
