"""The operator's pages see every tenant's rows; see tenants/row_security.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from tenants.row_security import bind_operator

_OPERATORS: Final = ("/admin/", "/operator/")


@sync_and_async_middleware
def operator_rows(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Staff, on the operator's pages."""

    async def asynchronous(request: HttpRequest) -> HttpResponseBase:
        if request.path.startswith(_OPERATORS) and (await request.auser()).is_staff:
            bind_operator()
        return await cast(Awaitable[HttpResponseBase], get_response(request))

    def synchronous(request: HttpRequest) -> HttpResponseBase:
        if request.path.startswith(_OPERATORS) and request.user.is_staff:
            bind_operator()
        return cast(HttpResponseBase, get_response(request))

    return asynchronous if iscoroutinefunction(get_response) else synchronous
