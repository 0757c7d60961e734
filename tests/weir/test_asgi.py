"""The split: /v1 without sessions and threads, everything else through Django's full list."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import path

from weir.api_handler import ApiHandler, PathSplit
from weir.asgi import application
from weir.logs import REQUEST_ID_HEADER
from weir.slow_clients import SLOW_BODIES, Answer

THREADS: list[int] = []


async def view(_request: HttpRequest) -> HttpResponse:
    THREADS.append(threading.get_ident())
    return HttpResponse("here")


urlpatterns = [path("v1/here", view), path("elsewhere", view)]


async def get(app: Any, url: str) -> tuple[int, dict[bytes, bytes]]:
    scope = {
        "type": "http",
        "method": "GET",
        "path": url,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    communicator = ApplicationCommunicator(app, scope)
    await communicator.send_input({"type": "http.request", "body": b"", "more_body": False})
    start = await communicator.receive_output(timeout=10)
    body = await communicator.receive_output(timeout=10)
    assert not body.get("more_body")
    await communicator.wait(timeout=10)
    return start["status"], dict(start["headers"])


@override_settings(ROOT_URLCONF=__name__)
async def test_the_api_skips_what_only_pages_need():
    status, headers = await get(application, "/v1/here")
    assert status == 200
    assert b"X-Request-Id" in headers
    assert b"X-Frame-Options" not in headers
    assert THREADS[-1] == threading.get_ident()

    status, headers = await get(application, "/elsewhere")
    assert status == 200
    assert headers[b"X-Frame-Options"] == b"DENY"
    assert b"Content-Security-Policy" in headers


async def test_only_the_prefix_itself_goes_inside():
    async def inside(_scope: Any, _receive: Any, send: Any) -> None:
        await send("inside")

    async def outside(_scope: Any, _receive: Any, send: Any) -> None:
        await send("outside")

    split = PathSplit("/v1/", inside=inside, outside=outside)
    for url, expected in (
        ("/v1/models", "inside"),
        ("/v1", "outside"),
        ("/v1x", "outside"),
        ("/x/v1/", "outside"),
    ):
        sent: list[str] = []

        async def send(message: str, sent: list[str] = sent) -> None:
            sent.append(message)

        await split({"path": url}, None, send)
        assert sent == [expected]


@override_settings(
    API_MIDDLEWARE=["django.middleware.common.CommonMiddleware", "whitenoise.middleware.WhiteNoiseMiddleware"]
)
def test_a_sync_middleware_in_the_token_path_is_refused():
    with pytest.raises(ImproperlyConfigured, match="WhiteNoiseMiddleware, which is not async"):
        ApiHandler()


def slow_body(path: str, **headers: str) -> Answer:
    """What is said to a request whose body does not come, before any view sees it."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return SLOW_BODIES.answer(
        {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": named}
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files", "/operator/workers/w/models"])
def test_a_slow_body_is_refused_in_the_apis_shape(path):
    answer = slow_body(path, x_request_id="mine")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (408, "body_too_slow", None)
    assert "4,096 bytes" in error["message"]
    assert "each 10 seconds" in error["message"]
    assert "send the request again" in error["message"]
    assert dict(answer.headers)[REQUEST_ID_HEADER] == "mine"
    assert dict(answer.headers)["Content-Type"] == "application/json"


def test_a_slow_body_is_refused_in_the_shape_that_its_client_reads():
    answer = slow_body("/v1/messages", x_request_id="mine")
    told = json.loads(answer.body)
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "timeout_error", "mine")
    page = slow_body("/chat/", accept="text/html")
    assert dict(page.headers)["Content-Type"].startswith("text/plain")
    assert b"4,096 bytes" in page.body
