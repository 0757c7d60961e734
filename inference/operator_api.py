"""The operator's live state as JSON: what waits, since when and for whom, and what the workers are doing.

For people who are staff, by their session; a tenant's key opens nothing here.
"""

from __future__ import annotations

import asyncio

import msgspec
from asgiref.sync import async_to_sync
from django.conf import settings
from django.http import HttpRequest, HttpResponse

from engine_worker.broker import BrokerUnavailable, ControlBroker, GatewayBroker, OperatorBroker
from inference.api.description import Operation, Operators
from inference.api.error_shapes import render_error
from inference.errors import MethodNotAllowed, NotAllowed, Overloaded
from inference.schemas.operator import LiveState

_TIMEOUT_S = 2.0


def live_state(request: HttpRequest) -> HttpResponse:
    """Queues, workers and dead letters."""
    if request.method not in ("GET", "HEAD"):
        return render_error(
            request,
            MethodNotAllowed(
                f"{request.method} is not allowed here, only GET, HEAD.",
                code="method_not_allowed",
                headers={"Allow": "GET, HEAD"},
            ),
        )
    if not request.user.is_staff:
        return render_error(
            request,
            NotAllowed("This is for the operator's staff: sign in as one of them.", code="staff_only"),
        )
    try:
        state = async_to_sync(read_live_state)()
    except BrokerUnavailable:
        return render_error(
            request,
            Overloaded(
                "The queue can't be reached at the moment. Try again shortly.", code="queue_unavailable"
            ),
        )
    response = HttpResponse(msgspec.json.encode(state), content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    return response


live_state.operations = (  # type: ignore[attr-defined]  # as in api/endpoint.py
    Operation("GET", Operators.STAFF, live_state, answer=LiveState),
)


async def read_live_state() -> LiveState:
    """Raises BrokerUnavailable."""
    # Clients of its own: a page runs on whatever event loop its thread was given.
    operator = OperatorBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    gateway = GatewayBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    control = ControlBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        models, workers, starting, processes = await asyncio.gather(
            operator.models(), gateway.workers(), gateway.starting(), control.processes()
        )
        queues = [await operator.queue(model) for model in models]
        dead = [
            letter for queue in queues if queue.dead for letter in await operator.dead_letters(queue.model)
        ]
    finally:
        await operator.aclose()
        await gateway.aclose()
        await control.aclose()
    serve = {(worker.worker_id, worker.model) for worker in workers}
    return {
        "models": queues,
        "workers": workers,
        "starting": [each for each in starting.values() if (each.worker_id, each.model) not in serve],
        "processes": processes,
        "dead_letters": dead,
    }
