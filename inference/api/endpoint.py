"""The four steps of every view under /v1: authenticate, parse, call, render."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Final, TypeVar

import msgspec
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from inference.api.api_errors import as_api_error
from inference.api.body import read_body
from inference.api.description import Operation
from inference.api.error_shapes import render_error
from inference.api.once import answer_once
from inference.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotAllowed,
    Unauthenticated,
)
from inference.runtime import Runtime, get_runtime
from inference.schemas.reading import read_query, refuse_unknown
from inference.services.idempotency import Claim
from inference.services.submission import new_request_id
from tenants.auth import authenticate_bearer
from tenants.client_address import client_address
from tenants.principal import Principal, Scope
from tenants.row_security import bind_tenant

_Request = TypeVar("_Request", bound=msgspec.Struct)
_Query = TypeVar("_Query", bound=msgspec.Struct)
RESUME_GRACE_MAX_S: Final = 120
_PARTS_AT_ONCE: Final = 2000
"""Numbers, or tokens with their probabilities: some milliseconds' work at most."""
_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True)
class ApiCall:
    """One authenticated request and what answers it."""

    request: HttpRequest
    principal: Principal
    runtime: Runtime
    claim: Claim | None = None
    """Of a request with an idempotency key."""
    started_at: float = field(default_factory=time.perf_counter)

    def new_request_id(self, prefix: str) -> str:
        """The id of the generation: with an idempotency key always the same one."""
        return new_request_id(prefix) if self.claim is None else f"{prefix}-{self.claim.request_hex}"

    @property
    def may_exist(self) -> bool:
        return self.claim is not None

    def read(self, kind: type[_Request]) -> _Request:
        """The body as a request struct. Raises InvalidRequest, TooLarge, UnsupportedMedia."""
        return read_body(self.request, kind)

    def query(self, kind: type[_Query], *, refuses_others: bool = False) -> _Query:
        """The query's parameters as a struct. Raises InvalidRequest.

        Others are left alone, as OpenAI does: clients and what stands before us add their own (`beta`,
        `api-version`). `refuses_others`: where one that was meant as a filter would leave a wrong sum.
        """
        given: dict[str, list[str]] = {}
        for name, texts in self.request.GET.lists():
            given.setdefault(name.removesuffix("[]"), []).extend(texts)  # lists, as OpenAI's SDKs send them
        if refuses_others:
            refuse_unknown(given, kind)
        return read_query(given, kind)

    def resume_grace_s(self) -> float:
        """How long a dropped stream goes on for a client that may come back: `x-weir-resume-grace`, seconds."""
        text = self.request.headers.get("x-weir-resume-grace", "0")
        if not (text.isascii() and text.isdecimal() and int(text[:9]) <= RESUME_GRACE_MAX_S):
            raise InvalidRequest(
                f"x-weir-resume-grace must be a whole number of seconds from 0 to {RESUME_GRACE_MAX_S}.",
                param="x-weir-resume-grace",
            )
        return float(text)

    def respond(self, body: Any, *, headers: dict[str, str] | None = None, status: int = 200) -> HttpResponse:
        response = HttpResponse(_ENCODER.encode(body), content_type="application/json", status=status)
        self._add_headers(response, headers or {})
        return response

    async def respond_off_loop(
        self, make: Callable[[], Any], *, size: int, headers: dict[str, str] | None = None
    ) -> HttpResponse:
        """The same of what `make` gives: in a thread where it has so many parts that the event loop would be held."""
        if size <= _PARTS_AT_ONCE:
            return self.respond(make(), headers=headers)
        loop = asyncio.get_running_loop()
        executor = self.runtime.models.executor
        body = await loop.run_in_executor(executor, lambda: msgspec.Raw(_ENCODER.encode(make())))
        return self.respond(body, headers=headers)

    async def stream(
        self, events: AsyncGenerator[bytes, None], *, headers: Callable[[], dict[str, str]] = dict
    ) -> StreamingHttpResponse:
        """Answers with the first event at hand (see `events_of`), and what is known by then in the headers.

        Raises ApiError where there is none.
        """
        pieces = _all_of(await anext(events), events)
        response = StreamingHttpResponse(pieces, content_type="text/event-stream; charset=utf-8")
        response.headers["Cache-Control"] = "no-cache, no-transform"
        response.headers["X-Accel-Buffering"] = "no"  # nginx must not hold events back
        self._add_headers(response, headers())
        return response

    def _add_headers(self, response: HttpResponse | StreamingHttpResponse, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            response.headers[name] = value
        response.headers["x-weir-tier"] = self.principal.tier.name
        response.headers["openai-processing-ms"] = str(round((time.perf_counter() - self.started_at) * 1000))


async def _all_of(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


View = Callable[..., Awaitable[HttpResponse | StreamingHttpResponse]]
Route = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def endpoint(method: str, *, scope: Scope, **tells: Any) -> Callable[[View], Route]:
    """A view of `ApiCall` that takes one method and needs a key with `scope`; `tells` is for its Operation."""

    def decorate(view: View) -> Route:
        operation = Operation(method, scope, view, **tells)

        @wraps(view)
        async def wrapped(request: HttpRequest, **path: Any) -> HttpResponseBase:
            try:
                if request.method != method and not (method == "GET" and request.method == "HEAD"):
                    raise _not_allowed(request, "GET, HEAD" if method == "GET" else method)
                principal = await _authenticate(request)
                if scope not in principal.scopes:
                    raise NotAllowed(
                        f"This key lacks the scope '{scope}'. Use one that has it, or ask an owner or admin of your "
                        "tenant for one.",
                        code="insufficient_permissions",
                    )
                principal = _with_own_deadline(request, principal)
                call = ApiCall(request, principal, get_runtime())
                key = request.headers.get("Idempotency-Key") if operation.generates else None
                if key is None:
                    return await view(call, **path)

                def work(claim: Claim) -> Awaitable[HttpResponse | StreamingHttpResponse]:
                    call.claim = claim
                    return view(call, **path)

                return await answer_once(request, principal, call.runtime, key, work)
            except Exception as error:
                return render_error(request, as_api_error(error))

        wrapped.csrf_exempt = True  # type: ignore[attr-defined]  # Django's own way to say so
        wrapped.operations = (operation,)  # type: ignore[attr-defined]  # in the same way
        return wrapped

    return decorate


def by_method(**routes: Route) -> Route:
    """One path for several methods: `by_method(GET=show, POST=make)`, each an `endpoint` of its own."""

    async def dispatch(request: HttpRequest, **path: Any) -> HttpResponseBase:
        route = routes.get("GET" if request.method == "HEAD" else request.method or "")
        if route is not None:
            return await route(request, **path)
        allowed = ", ".join([*routes, "HEAD"] if "GET" in routes else routes)
        return render_error(request, _not_allowed(request, allowed))

    dispatch.csrf_exempt = True  # type: ignore[attr-defined]  # as above
    dispatch.operations = tuple(  # type: ignore[attr-defined]  # as above
        operation for route in routes.values() for operation in getattr(route, "operations", ())
    )
    return dispatch


def _not_allowed(request: HttpRequest, allowed: str) -> MethodNotAllowed:
    return MethodNotAllowed(
        f"{request.method} is not allowed here, only {allowed}.",
        code="method_not_allowed",
        headers={"Allow": allowed},
    )


async def _authenticate(request: HttpRequest) -> Principal:
    kind, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if not kind and (key := request.headers.get("x-api-key")):  # Anthropic's clients
        kind, token = "bearer", key
    if token and kind.lower() != "bearer":
        raise Unauthenticated("Send your API key as 'Authorization: Bearer KEY'.", code="invalid_api_key")
    principal = await authenticate_bearer(token.strip() or None, client_address(request))
    bind_tenant(principal.tenant_id)
    return principal


def _with_own_deadline(request: HttpRequest, principal: Principal) -> Principal:
    """What `x-weir-deadline-s` asks for, never more than the tier's. Raises InvalidRequest."""
    text = request.headers.get("x-weir-deadline-s")
    if text is None:
        return principal
    most = principal.tier.deadline_s
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(
            f"x-weir-deadline-s must be a whole number of seconds from 1 to {most}.",
            param="x-weir-deadline-s",
        )
    return replace(principal, tier=replace(principal.tier, deadline_s=int(text)))
