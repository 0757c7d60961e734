"""What Django itself or the server below refuses, before a view is asked: in the API's shape where programs ask, a page
for people."""

from __future__ import annotations

import re
import sys
from typing import Final

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.views import defaults
from django.views.csrf import csrf_failure as csrf_page

from inference.api.error_shapes import render_error
from inference.errors import InternalError, InvalidRequest, NotAllowed, NotFound, Overloaded, SlowBody
from inference.nearest_route import lacks_its_base, nearest_route
from inference.outages import outage

_RETRY_AFTER_S: Final = 5
_FOR_PROGRAMS: Final = re.compile(r"/+(?:v1|operator)(?:/|\Z)")


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    if _asks_as_program(request):
        return render_error(
            request,
            InvalidRequest("The request is malformed. Look at its address, its Host header and its form."),
        )
    return defaults.bad_request(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    is_browser = "text/html" in request.headers.get("Accept", "")
    is_program = lacks_its_base(request.path_info) or _speaks_as_program(request)
    if _asks_as_program(request) or (is_program and not is_browser):
        return no_such_url(request)
    return defaults.page_not_found(request, exception)


def slow_body(request: HttpRequest, *, pace: int, within_s: float) -> HttpResponse:
    error = SlowBody(
        f"The body came too slowly: {pace:,} bytes of it, or all that is left, must come in each {within_s:g} seconds. "
        "This connection ends here: send the request again, its body in one go."
    )
    if _asks_as_program(request) or _speaks_as_program(request):
        return render_error(request, error)
    return HttpResponse(error.message, status=error.status, content_type="text/plain; charset=utf-8")


def server_error(request: HttpRequest) -> HttpResponseBase:
    """Django calls it while it handles what went wrong, and does not say what that was."""
    if (away := outage(sys.exc_info()[1])) is not None:
        return render_error(request, away) if _asks_as_program(request) else _come_back(request, away)
    if _asks_as_program(request):
        return render_error(
            request,
            InternalError(),
        )
    return defaults.server_error(request)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponseBase:
    if _asks_as_program(request):
        return render_error(
            request,
            NotAllowed(
                "Who comes by a session sends its CSRF token as X-CSRFToken; programs send WEIR_OPERATOR_TOKEN "
                "as 'Authorization: Bearer TOKEN'.",
                code="csrf_failed",
            ),
        )
    return csrf_page(request, reason)


def _come_back(request: HttpRequest, away: Overloaded) -> HttpResponse:
    """Without a request's context: that would ask the database who is there."""
    again = request.get_full_path() if request.method in ("GET", "HEAD") else "/"
    page = HttpResponse(render_to_string("503.html", {"words": away.message, "again": again}), status=503)
    page.headers["Retry-After"] = str(away.retry_after_s or _RETRY_AFTER_S)
    page.headers["Cache-Control"] = "no-store"
    return page


def no_such_url(request: HttpRequest) -> HttpResponse:
    path = request.path_info
    words = f"There is no {request.method} {request.path[:200]} here."
    if not _asks_as_program(request):
        words += f" The base URL of the API is {settings.BASE_URL}/v1."
    if meant := nearest_route(request.method or "", path):
        words += f" Did you mean {meant}?"
    else:
        words += " GET /v1/openapi.json lists what there is."
    return render_error(request, NotFound(words, code="unknown_url"))


def _asks_as_program(request: HttpRequest) -> bool:
    return _FOR_PROGRAMS.match(request.path_info) is not None


def _speaks_as_program(request: HttpRequest) -> bool:
    """It sends JSON or asks for it, or shows a key."""
    headers = request.headers
    says_json = "json" in headers.get("Accept", "") or request.content_type == "application/json"
    return (
        says_json or "x-api-key" in headers or headers.get("Authorization", "").lower().startswith("bearer ")
    )
