"""The gateway's measurements for Prometheus, and the queue's, which every gateway sees alike.

A gateway is one process, so prometheus_client's own registry is enough; Celery's is in celery_metrics.py.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import Resolver404, resolve
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_worker.broker import BrokerUnavailable
from inference.operator_api import read_live_state
from inference.schemas.operator import LiveState

_Application: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

REQUESTS = Counter("weir_http_requests", "Answered, by the route's pattern.", ["route", "method", "status"])
IN_PROGRESS = Gauge("weir_http_requests_in_progress", "Being answered; a stream until its end.")
FIRST_BYTE = Histogram(
    "weir_http_first_byte_seconds",
    "From the request to the first byte of its body.",
    ["route"],
    buckets=_SECONDS,
)
DURATION = Histogram(
    "weir_http_request_duration_seconds", "From the request to the last byte of its answer.", ["route"],
    buckets=_SECONDS,
)  # fmt: skip
SOCKETS = Gauge("weir_websockets_open", "Websockets that are connected.")


def route_of(path: str) -> str:
    """The pattern that serves `path`: bounded, whatever clients ask for, and without anybody's ids."""
    if path.startswith("/admin/"):
        return "admin/"
    if path.startswith(settings.STATIC_URL):
        return "static/"
    return _route_of(settings.ROOT_URLCONF, path)


@lru_cache(maxsize=512)
def _route_of(_urlconf: str, path: str) -> str:
    try:
        return resolve(path).route
    except Resolver404:
        return "unmatched"


class Measured:
    """An ASGI application whose requests are counted and timed, to the end of their streams."""

    def __init__(self, inner: _Application) -> None:
        self._inner = inner

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            with SOCKETS.track_inprogress():
                await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        started = time.perf_counter()
        route = route_of(scope["path"])
        status = "none"  # the client left before there was one

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif message.get("body") and not seen:
                seen.append(True)
                FIRST_BYTE.labels(route).observe(time.perf_counter() - started)
            await send(message)

        seen: list[bool] = []
        with IN_PROGRESS.track_inprogress():
            try:
                await self._inner(scope, receive, counted)
            finally:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                REQUESTS.labels(route, method, status).inc()
                DURATION.labels(route).observe(time.perf_counter() - started)


class _QueueCollector(Collector):
    """What Redis knew a moment ago; nothing when it could not be asked."""

    def __init__(self, state: LiveState | None) -> None:
        self._state = state

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily(
            "weir_redis_up", "Whether this gateway reaches Redis.", float(self._state is not None)
        )
        if self._state is None:
            return [up]
        waiting = GaugeMetricFamily("weir_queue_waiting_requests", "In line.", labels=["model", "tier_rank"])
        oldest = GaugeMetricFamily(
            "weir_queue_oldest_seconds", "How long the first in line waits.", labels=["model", "tier_rank"]
        )
        running = GaugeMetricFamily("weir_queue_running_requests", "Claimed by a worker.", labels=["model"])
        dead = GaugeMetricFamily("weir_queue_dead_letters", "Failed for good, kept a day.", labels=["model"])
        workers = GaugeMetricFamily("weir_workers", "Workers alive.", labels=["model", "state"])
        alive: dict[tuple[str, str], int] = {}
        for queue in self._state["models"]:
            running.add_metric([queue.model], queue.running)
            dead.add_metric([queue.model], queue.dead)
            # A model whose workers are all gone says 0: what is absent can't be alerted on.
            alive[queue.model, "serving"] = alive[queue.model, "draining"] = 0
            for tier in queue.tiers:
                waiting.add_metric([queue.model, str(tier.rank)], tier.waiting)
                oldest.add_metric([queue.model, str(tier.rank)], tier.oldest_ms / 1000)
        for worker in self._state["workers"]:
            key = worker.model, "draining" if worker.draining else "serving"
            alive[key] = alive.get(key, 0) + 1
        for (model, state), count in alive.items():
            workers.add_metric([model, state], count)
        return [up, waiting, oldest, running, dead, workers]


async def metrics(request: HttpRequest) -> HttpResponse:
    """`/metrics`, for who has the token; without one configured there is no such page."""
    expected = settings.METRICS_TOKEN
    given = request.headers.get("Authorization", "")
    if expected is None or not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
        raise Http404
    try:
        state = await read_live_state()
    except BrokerUnavailable:
        state = None
    queue = CollectorRegistry(auto_describe=False)
    queue.register(_QueueCollector(state))
    return HttpResponse(generate_latest(REGISTRY) + generate_latest(queue), content_type=CONTENT_TYPE_LATEST)
