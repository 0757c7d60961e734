"""`GET /v1/usage` and `GET /v1/usage/costs`: what the tenant used, from the ledger's roll-ups."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from functools import partial
from typing import Final, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.errors import InvalidRequest
from inference.reports import BadCursor, Dimension, Report, Width, usage_page
from inference.schemas.usage import UsagePage, usage_line
from tenants.principal import Scope

_Choice = TypeVar("_Choice", bound=StrEnum)
_LIMIT_MAX: Final = 1000
_LIMIT: Final = 100
_SPAN: Final = timedelta(days=30)
_SPAN_MAX: Final = timedelta(days=3660)
_PARAMETERS: Final = {"start", "end", "bucket_width", "group_by", "limit", "page", *Dimension}


@endpoint("GET", scope=Scope.USAGE_READ)
async def usage(call: ApiCall) -> HttpResponse:
    return await _page(call, with_counts=True)


@endpoint("GET", scope=Scope.USAGE_READ)
async def costs(call: ApiCall) -> HttpResponse:
    return await _page(call, with_counts=False)


async def _page(call: ApiCall, *, with_counts: bool) -> HttpResponse:
    asked = call.request.GET
    for name in asked:
        if name not in _PARAMETERS:
            raise InvalidRequest(f"There is no parameter '{name[:80]}' here.", param=name[:80])
    report = _report(call)
    limit = _number(asked.get("limit"), "limit", default=_LIMIT)
    if not 1 <= limit <= _LIMIT_MAX:
        raise InvalidRequest(f"'limit' is 1 to {_LIMIT_MAX}.", param="limit")
    try:
        page = await sync_to_async(partial(usage_page, report, limit=limit, cursor=asked.get("page")))()
    except BadCursor as error:
        raise InvalidRequest(f"'page' will not do: {error}.", param="page") from None
    lines = [usage_line(line, with_counts=with_counts) for line in page.lines]
    return call.respond(UsagePage(lines, page.next_cursor is not None, page.next_cursor))


def _report(call: ApiCall) -> Report:
    asked, zone = call.request.GET, ZoneInfo(call.principal.zone)
    width = _choice(Width, asked.get("bucket_width", Width.DAY), "bucket_width")
    local: tzinfo = UTC if width is Width.HOUR else zone
    now = datetime.now(local)
    until = _moment(asked.get("end"), "end", local) or now + timedelta(days=1)
    since = _moment(asked.get("start"), "start", local) or until - _SPAN
    if not timedelta(0) < until - since <= _SPAN_MAX:
        raise InvalidRequest(f"'start' comes before 'end', by at most {_SPAN_MAX.days} days.", param="start")
    names = [name for name in asked.get("group_by", "").split(",") if name]
    group_by = tuple(dict.fromkeys(_choice(Dimension, name, "group_by") for name in names))
    filters = {
        dimension: _ids(values, dimension) for dimension in Dimension if (values := asked.getlist(dimension))
    }
    return Report(call.principal.tenant_id, since, until, width, group_by, filters)


def _ids(values: list[str], dimension: Dimension) -> list[str]:
    if dimension in (Dimension.PROJECT, Dimension.KEY):
        try:
            return [str(UUID(value)) for value in values]
        except ValueError:
            raise InvalidRequest(f"'{dimension}' is an id.", param=dimension) from None
    if any("\x00" in value for value in values):
        raise InvalidRequest(f"'{dimension}' holds a NUL.", param=dimension)
    return values


def _moment(text: str | None, name: str, zone: tzinfo) -> datetime | None:
    """Unix seconds, or a date or time of ISO 8601; in the report's zone."""
    if text is None:
        return None
    try:
        if text.isdecimal():
            return datetime.fromtimestamp(int(text), tz=zone)
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=zone) if moment.tzinfo is None else moment.astimezone(zone)
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"'{name}' is a date (2026-11-29), a time of ISO 8601, or Unix seconds.", param=name
        ) from None


def _choice(kind: type[_Choice], text: str, name: str) -> _Choice:
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequest(f"'{name}' is one of {', '.join(kind)}.", param=name) from None


def _number(text: str | None, name: str, *, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"'{name}' is a whole number.", param=name)
    return int(text)
