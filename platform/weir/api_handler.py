"""Django's ASGI handler with a middleware list of its own, for the token path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response
from django.utils.module_loading import import_string

_Application: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class ApiHandler(ASGIHandler):
    """Serves the same URLs as Django's own handler through `settings.API_MIDDLEWARE` alone."""

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


class PathSplit:
    """An ASGI application that sends some parts of the URL space elsewhere."""

    def __init__(self, *prefixes: str, inside: _Application, outside: _Application) -> None:
        self._prefixes = prefixes
        self._inside = inside
        self._outside = outside

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        application = self._inside if scope["path"].startswith(self._prefixes) else self._outside
        await application(scope, receive, send)
