"""What Django itself refuses, before a view is asked: in the API's shape where programs ask, a page for people."""

from __future__ import annotations

import re
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.views import defaults
from django.views.csrf import csrf_failure as csrf_page

from inference.api.error_shapes import render_error
from inference.errors import GenerationFailed, InvalidRequest, NotAllowed, NotFound

_FOR_PROGRAMS: Final = re.compile(r"/+(?:v1|operator)(?:/|\Z)")


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    if _asks_as_program(request):
        return render_error(request, InvalidRequest("The request is malformed."))
    return defaults.bad_request(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    if _asks_as_program(request):
        return no_such_url(request)
    return defaults.page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponseBase:
    if _asks_as_program(request):
        return render_error(
            request,
            GenerationFailed(
                "The server had an error. Tell the operator the x-request-id.", code="internal_error"
            ),
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


def no_such_url(request: HttpRequest) -> HttpResponse:
    return render_error(
        request,
        NotFound(f"There is no {request.method} {request.path[:200]} here.", code="unknown_url"),
    )


def _asks_as_program(request: HttpRequest) -> bool:
    return _FOR_PROGRAMS.match(request.path_info) is not None
