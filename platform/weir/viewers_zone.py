"""The operator's admin in the time zone of who looks at it. The console's times are the browser's own affair
(`times.js`); the admin's are Django's, which shows, reads and filters in one zone: the browser tells it which."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import timezone

COOKIE: Final = "weir_zone"
"""What `zone.js` sets."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+){0,2}")


def viewers_zone(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """A middleware. Who has told of no zone, or of none that is known here, sees UTC; each time says in which it is."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        zone = (
            _zone(request.COOKIES.get(COOKIE, "")[:64]) if request.path_info.startswith("/admin/") else None
        )
        if zone is None:
            return get_response(request)
        with timezone.override(zone):
            return get_response(request)

    return middleware


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo | None:
    if not _NAME.fullmatch(name):
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # none, or a directory of them
        return None
