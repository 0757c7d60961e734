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
