"""Websocket routes."""

from __future__ import annotations

from django.urls import URLPattern, path

from inference.consumers import ChatConsumer
from inference.live import LiveConsumer

websocket_urlpatterns: list[URLPattern] = [
    path("ws/chat", ChatConsumer.as_asgi()),
    path("ws/live", LiveConsumer.as_asgi()),
]
