"""The ASGI handler of the token path: Django's requests, views and responses, without what only pages need."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final, TypeAlias

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, RequestAborted
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, ResolverMatch, resolve
from django.utils.log import log_response
from django.utils.module_loading import import_string

from inference.database_thread import DatabaseThread
from inference.nearest_route import has_dots
from weir.turnstile import Turnstile

_Application: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

_PER_TURN: Final = 8
"""Requests that begin in one turn of the event loop: about a millisecond each until they first wait for Redis."""
_LISTEN_AFTER_S: Final = 0.05
"""What is answered sooner needs no task that hears whether its client leaves."""


class ApiHandler(ASGIHandler):
    """Serves the same URLs as Django's own handler through `settings.API_MIDDLEWARE` alone.

    Django's starts a thread for each request, to run what listens to `request_started` and `request_finished`:
    closing what is stale of the database. Here that is done only for requests that used the database.
    """

    def __init__(self) -> None:
        super().__init__()
        self._door = Turnstile(_PER_TURN)

    def load_middleware(self, is_async: bool = True) -> None:
        # After django.core.handlers.base.BaseHandler.load_middleware, without what only sync
        # middleware and the hooks of MiddlewareMixin need.
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        handler: Any = convert_exception_to_response(self._get_response_async)  # type: ignore[attr-defined]  # not in the stubs
        for path in reversed(settings.API_MIDDLEWARE):
            factory = import_string(path)
            if not getattr(factory, "async_capable", False):
                raise ImproperlyConfigured(f"API_MIDDLEWARE names {path}, which is not async")
            handler = convert_exception_to_response(factory(handler))
        self._middleware_chain = handler

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self._door.passed()
        async with DatabaseThread():
            await self.handle(scope, receive, send)

    async def handle(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        with body:
            request, refused = self.create_request(scope, body)
            if request is None:
                assert refused is not None
                await self.send_response(refused, send)
            else:
                await self._answer(request, receive, send)

    async def read_body(self, receive: Any) -> Any:
        first = await receive()
        if first["type"] == "http.request" and not first.get("more_body", False):
            return io.BytesIO(first.get("body", b""))  # nearly always

        async def all_of_it() -> Any:
            nonlocal first
            if (message := first) is None:
                return await receive()
            first = None
            return message

        return await super().read_body(all_of_it)

    async def _answer(self, request: ASGIRequest, receive: Any, send: Any) -> None:
        """Until it is sent, or the client has left: then the view is cancelled, as by Django's own handler."""
        answering = asyncio.current_task()
        assert answering is not None
        is_answered = has_left = False

        def leave(listening: asyncio.Task[Any]) -> None:
            nonlocal has_left
            if not is_answered and not listening.cancelled():
                has_left = True
                answering.cancel()

        listening: asyncio.Task[Any] | None = None

        def listen() -> None:
            nonlocal listening
            listening = asyncio.create_task(_received(receive), name="api-disconnect")
            listening.add_done_callback(leave)

        timer = asyncio.get_running_loop().call_later(_LISTEN_AFTER_S, listen)
        try:
            response = await self._middleware_chain(request)
            # Refusals are counted, not logged: in a flood the lines would cost more than the answers.
            if response.status_code >= 500 and not response.has_header("Retry-After"):
                log_response(
                    "%s: %s", response.reason_phrase, request.path, response=response, request=request
                )
            await self.send_response(response, send)
        except asyncio.CancelledError:
            if not has_left:
                raise
            answering.uncancel()
        finally:
            is_answered = True
            timer.cancel()
            if listening is not None:
                listening.cancel()
            request.close()

    def resolve_request(self, request: HttpRequest) -> ResolverMatch:
        request.resolver_match = match = _resolved(settings.ROOT_URLCONF, request.path_info)
        return match

    async def send_response(self, response: HttpResponseBase, send: Any) -> None:
        headers = [(name.encode("ascii"), value.encode("latin1")) for name, value in response.items()]
        if not response.streaming:
            content = response.content  # type: ignore[attr-defined]  # of those that don't stream
            if not response.has_header("Content-Length"):
                headers.append((b"Content-Length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async with aclosing(aiter(response)) as parts:  # type: ignore[arg-type, var-annotated]
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _received(receive: Any) -> Any:
    return await receive()  # not every server's is a coroutine


@lru_cache(maxsize=512)
def _resolved(_urlconf: str, path: str) -> ResolverMatch:
    if has_dots(path):
        raise Resolver404({"path": path})  # where an id stands it would be taken for one
    return resolve(path)


class PathSplit:
    """An ASGI application that sends some parts of the URL space elsewhere."""

    def __init__(self, *prefixes: str, inside: _Application, outside: _Application) -> None:
        self._prefixes = prefixes
        self._inside = inside
        self._outside = outside

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        application = self._inside if scope["path"].startswith(self._prefixes) else self._outside
        await application(scope, receive, send)
