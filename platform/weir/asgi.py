"""ASGI entry point: HTTP to Django, websockets to Channels.

The API under /v1, and what a probe asks, has a handler of its own with a short, async-only list of
middleware: no session, no CSRF, no thread hop. Everything else, the console and the admin, goes through
Django's full list.
"""

from __future__ import annotations

import gc
import io
import os
from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIRequest

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
_pages = get_asgi_application()  # sets Django up: what follows may import models

from inference.metrics import Measured  # noqa: E402
from inference.outside_views import slow_body  # noqa: E402
from inference.routing import websocket_urlpatterns  # noqa: E402
from inference.runtime import break_off_streams  # noqa: E402
from weir.api_handler import ApiHandler, PathSplit  # noqa: E402
from weir.logs import REQUEST_ID_HEADER, name_request  # noqa: E402
from weir.slow_clients import BODY_PACE, BODY_S, SLOW_BODIES, Answer  # noqa: E402
from weir.stopping import STOPPING  # noqa: E402
from weir.tracing import Traced  # noqa: E402

_measured = Measured(
    ProtocolTypeRouter(
        {
            "http": PathSplit("/v1/", "/healthz", "/readyz", "/metrics", inside=ApiHandler(), outside=_pages),
            "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
        }
    )
)


def answer_slow_body(scope: dict[str, Any]) -> Answer:
    """To a request that no view sees."""
    request = ASGIRequest(scope, io.BytesIO())
    request_id = name_request(request)
    response = slow_body(request, pace=BODY_PACE, within_s=BODY_S)
    headers = {**response.headers, REQUEST_ID_HEADER: request_id}
    return Answer(response.status_code, headers.items(), response.content)


SLOW_BODIES.answer = answer_slow_body
STOPPING.drain_s, STOPPING.break_off = settings.GATEWAY_DRAIN_S, break_off_streams
application = Traced(_measured) if settings.TRACING else _measured

# What is loaded now stays: without this each full collection would look through all of it, between two tokens.
gc.collect()
gc.freeze()
# A full collection looks through all that open streams hold, 20 to 40 ms with 500 of them, and finds little: ten times
# as rarely as Python would.
gc.set_threshold(*gc.get_threshold()[:2], 100)
