"""What a report is asked for with: the parameters of `/v1/usage`, its siblings and exports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Final, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from django.http import QueryDict

from engine_worker.protocol import FinishReason
from inference.errors import InvalidRequest
from inference.reports import Dimension, Report, Width
from tenants.principal import Principal

_Choice = TypeVar("_Choice", bound=StrEnum)
_REASONS: Final = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.CANCELLED,
    FinishReason.DEADLINE,
    FinishReason.ERROR,
)
_SPAN: Final = timedelta(days=30)
_SPAN_MAX: Final = timedelta(days=3660)


def read_report(asked: QueryDict, principal: Principal) -> Report:
    """The report that these parameters ask for. Raises InvalidRequest."""
    zone = ZoneInfo(principal.zone)
    width = read_choice(Width, asked.get("bucket_width", Width.DAY), "bucket_width")
    local: tzinfo = UTC if width is Width.HOUR else zone
    now = datetime.now(local)
    until = read_moment(asked.get("end"), "end", local) or now + timedelta(days=1)
    since = read_moment(asked.get("start"), "start", local) or until - _SPAN
    if not timedelta(0) < until - since <= _SPAN_MAX:
        raise InvalidRequest(f"'start' comes before 'end', by at most {_SPAN_MAX.days} days.", param="start")
    names = [name for text in asked.getlist("group_by") for name in text.split(",") if name]
    group_by = tuple(dict.fromkeys(read_choice(Dimension, name, "group_by") for name in names))
    filters = {dimension: values for dimension in Dimension if (values := _values(asked, dimension))}
    return Report(principal.tenant_id, since, until, width, group_by, filters)


def _values(asked: QueryDict, dimension: Dimension) -> list[str]:
    values = asked.getlist(dimension)
    if dimension is Dimension.FINISH_REASON and not set(values) <= set(_REASONS):
        raise InvalidRequest(f"'{dimension}' is one of {', '.join(_REASONS)}.", param=dimension)
    return read_ids(values, dimension, are_uuids=dimension in (Dimension.PROJECT, Dimension.KEY))


def read_ids(values: list[str], name: str, *, are_uuids: bool) -> list[str]:
    if are_uuids:
        try:
            return [str(UUID(value)) for value in values]
        except ValueError:
            raise InvalidRequest(f"'{name}' must be the id of one.", param=name) from None
    if any("\x00" in value for value in values):
        raise InvalidRequest(f"'{name}' holds a NUL character. Leave that out.", param=name)
    return values


def read_moment(text: str | None, name: str, zone: tzinfo) -> datetime | None:
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
            f"'{name}' must be a date (2026-11-29), a time of ISO 8601, or Unix seconds.", param=name
        ) from None


def read_choice(kind: type[_Choice], text: str, name: str) -> _Choice:
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequest(f"'{name}' is one of {', '.join(kind)}.", param=name) from None


def read_number(text: str | None, name: str, *, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"'{name}' must be a whole number from 0 to 999999999.", param=name)
    return int(text)
