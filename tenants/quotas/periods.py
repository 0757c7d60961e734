"""Calendar days and months, in a tenant's time zone: the periods of budgets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from tenants.principal import Calendar


@dataclass(frozen=True, slots=True)
class Period:
    name: str
    """Part of the counter's key: `2026-11-29` or `2026-11`."""
    first_day: date
    end_day: date
    """The first day that is no longer in it."""
    ends_at_ms: int
    """Unix time: midnight there, 23 or 25 hours after the last one when the clocks are changed."""


def period_at(calendar: Calendar, moment: datetime, zone: str) -> Period:
    """The period of that kind which `moment` (aware) is in."""
    day = moment.astimezone(ZoneInfo(zone)).date()
    if calendar is Calendar.DAY:
        first, end, name = day, day + timedelta(days=1), f"{day:%Y-%m-%d}"
    else:
        first = day.replace(day=1)
        end, name = (first + timedelta(days=31)).replace(day=1), f"{day:%Y-%m}"
    midnight = datetime.combine(end, time.min, ZoneInfo(zone))
    return Period(name, first, end, int(midnight.timestamp() * 1000))
