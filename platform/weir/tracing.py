"""Traces of the API: one span per request, from its first byte to its last. Off unless WEIR_TRACING is on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from django.core.exceptions import ImproperlyConfigured
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_worker.tracing import TracingUnavailable, set_up
from inference.metrics import route_of
from inference.tracing import REQUEST_ID, TRACER

_Application: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
_CONTEXT_HEADERS: Final = (b"traceparent", b"tracestate")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Traced:
    """An ASGI application whose requests under /v1 are spans, below the client's own where it sent one."""

    def __init__(self, inner: _Application) -> None:
        self._inner = inner
        try:
            set_up("weir-gateway")
        except TracingUnavailable as error:
            raise ImproperlyConfigured(str(error)) from error

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._inner(scope, receive, send)
            return
        given = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT_HEADERS
        }
        method, route = scope["method"], route_of(scope["path"])
        span = TRACER.start_span(
            f"{method} {route}",
            _PROPAGATOR.extract(given),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route, "url.scheme": scope["scheme"]},
        )

        async def noted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                _note_start(span, message)
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._inner(scope, receive, noted)


def _note_start(span: Span, message: dict[str, Any]) -> None:
    status = message["status"]
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    for name, value in message.get("headers", ()):
        if name.lower() == REQUEST_ID.encode():
            span.set_attribute("weir.request_id", value.decode("latin-1"))
