"""Query parameters, as structs: what is checked is what the OpenAPI document says."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

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


class AlertsQuery(msgspec.Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 100


class ResponseQuery(msgspec.Struct, kw_only=True):
    stream: bool = False
    """Only false: what is stored is not streamed."""


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
    """Names of filters, with commas, or several times."""
    project: list[str] = []
    key: list[str] = []
    model: list[str] = []
    tier: list[str] = []
    finish_reason: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    page: str | None = None
    """`next_page` of the page before."""


UnixTime: TypeAlias = Annotated[int, Meta(ge=0, le=2**37)]


class BucketQuery(msgspec.Struct, kw_only=True):
    """As in OpenAI's usage API. Lists are names repeated, with or without `[]`."""

    start_time: UnixTime
    """Unix seconds; what it falls in is the first bucket."""
    end_time: UnixTime | None = None
    """Not included, but the bucket that it falls in is told whole; without it, until now."""
    project_ids: list[str] = []
    api_key_ids: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=180)] | None = None
    """Buckets: 7 days of at most 31 (costs: 180), 24 hours of at most 168."""
    page: str | None = None
    """`next_page` of the page before."""


class UsageBucketQuery(BucketQuery, kw_only=True):
    bucket_width: Literal["1d", "1h"] = "1d"
    """Days of the tenant's time zone, hours of UTC."""
    group_by: list[Literal["project_id", "api_key_id", "model", "service_tier"]] = []
    models: list[str] = []


class CostBucketQuery(BucketQuery, kw_only=True):
    bucket_width: Literal["1d"] = "1d"
    group_by: list[Literal["project_id", "api_key_id", "line_item"]] = []
    line_items: list[str] = []
    """Models."""


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
