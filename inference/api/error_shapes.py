"""The one place that renders errors: in OpenAI's shape, or in Anthropic's for who speaks its API."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import structlog
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.http import HttpRequest, HttpResponse

from inference.errors import ApiError, InvalidRequest
from inference.schemas.messages import THREAD_UNSUPPORTED

_ENCODER = msgspec.json.Encoder()
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_OVERLOADED: Final = 529


def invalid_request(error: ValidationError) -> InvalidRequest:
    """What a service refuses, as the API says it: `param` is the first field that won't do, None for all together."""
    fields = [name for name in getattr(error, "error_dict", ()) if name != NON_FIELD_ERRORS]
    return InvalidRequest(" ".join(error.messages), param=fields[0] if fields else None)


def speaks_anthropic(request: HttpRequest) -> bool:
    """Anthropic's clients name the version of its API with each request, also on routes that both APIs have."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error. It has no field for the parameter, so the message names it."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    told: dict[str, Any] = {
        "type": _ANTHROPIC_TYPES.get(error.http_status, "api_error"),
        "message": message,
        "code": error.code,  # ours: Anthropic's types tell less apart
    }
    if error.code == THREAD_UNSUPPORTED:
        told["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {
        "type": "error",
        "error": told | error.told_wait(),
        "request_id": structlog.contextvars.get_contextvars().get("request_id"),
    }


def render_error(request: HttpRequest, error: ApiError) -> HttpResponse:
    is_anthropic = speaks_anthropic(request)
    body = anthropic_error(error) if is_anthropic else {"error": error.body()}
    status = error.http_status
    if is_anthropic and status == 503:
        status = _ANTHROPIC_OVERLOADED
    response = HttpResponse(_ENCODER.encode(body), content_type="application/json", status=status)
    for name, value in error.headers.items():
        response.headers[name] = value
    if error.retry_after_ms is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
        response.headers["retry-after-ms"] = str(error.retry_after_ms)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
