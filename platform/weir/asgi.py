"""ASGI entry point: HTTP to Django, websockets to Channels.

The API under /v1, and what a probe asks, has a handler of its own with a short, async-only list of
middleware: no session, no CSRF, no thread hop. Everything else, the console and the admin, goes through
Django's full list.
"""

from __future__ import annotations

import gc
import os

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.conf import settings
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
_pages = get_asgi_application()  # sets Django up: what follows may import models

from inference.metrics import Measured  # noqa: E402
from inference.routing import websocket_urlpatterns  # noqa: E402
from inference.runtime import break_off_streams  # noqa: E402
from weir.api_handler import ApiHandler, PathSplit  # noqa: E402
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
STOPPING.drain_s, STOPPING.break_off = settings.GATEWAY_DRAIN_S, break_off_streams
application = Traced(_measured) if settings.TRACING else _measured

# What is loaded now stays: without this each full collection would look through all of it, between two tokens.
gc.collect()
gc.freeze()
# A full collection looks through all that open streams hold, 20 to 40 ms with 500 of them, and finds little: ten times
# as rarely as Python would.
gc.set_threshold(*gc.get_threshold()[:2], 100)
