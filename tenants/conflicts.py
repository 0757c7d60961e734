"""Two who change what belongs together at the same moment, where PostgreSQL is the first to see it.

Services lock what they rely on, and say in words what is not so any more. What is left (a name taken twice, something
deleted that was just referred to) is refused by a constraint: the caller's to try again, and no fault of the server's.
"""

from __future__ import annotations

from typing import Final

import structlog
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.deprecation import MiddlewareMixin

log = structlog.get_logger(__name__)

_OF_TWO_AT_ONCE: Final = frozenset({"23503", "23505"})
"""SQLSTATE of a foreign key's violation, and of a unique constraint's (PostgreSQL, appendix A)."""


def is_conflict(error: BaseException) -> bool:
    """Whether it is that; it is in the log then, with the constraint's name."""
    if not isinstance(error, IntegrityError):
        return False
    cause = error.__cause__
    if getattr(cause, "sqlstate", None) not in _OF_TWO_AT_ONCE:
        return False
    diagnostics = getattr(cause, "diag", None)
    log.warning("conflict", constraint=getattr(diagnostics, "constraint_name", None))
    return True


class ConflictMiddleware(MiddlewareMixin):
    """A page of 409, and not of 500. The API renders its own."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        return render(request, "409.html", status=409) if is_conflict(exception) else None
