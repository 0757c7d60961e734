"""Where a request comes from, as far as can be trusted."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest


def client_address(request: HttpRequest) -> str | None:
    """The peer's address; behind the trusted proxy, the one that the proxy saw.

    A client can send X-Forwarded-For too: only the last entry is the proxy's own.
    """
    if settings.BEHIND_PROXY and (forwarded := request.META.get("HTTP_X_FORWARDED_FOR")):
        return str(forwarded).rsplit(",", 1)[-1].strip() or None
    address: str | None = request.META.get("REMOTE_ADDR") or None
    return address
