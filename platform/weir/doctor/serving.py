"""Who does the work: engine workers, Celery, the gateway that clients call."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from typing import Final

from django.conf import settings

from engine_worker.broker import BrokerUnavailable, OperatorBroker, UsageReader
from inference.operator_api import read_live_state
from weir.celery import app
from weir.doctor.finding import RESTART, TIMEOUT_S, Finding
from weir.doctor.servers import CLOCK_S, SET_THE_CLOCK
from weir.logs import mask

_USAGE_MANY: Final = 10_000


def engine() -> Iterator[Finding]:
    try:
        state = asyncio.run(read_live_state())
    except BrokerUnavailable as error:
        yield Finding("error", "engine", f"the queue can't be read: {error}", "Look at Redis's log.")
        return
    serving = sorted({worker.model for worker in state["workers"] if not worker.draining})
    if not serving:
        draining = " (all that are alive are draining)" if state["workers"] else ""
        yield Finding(
            "error",
            "engine",
            f"no worker serves a model{draining}: every request is refused",
            f"Start one: python -m engine_worker --model NAME=DIRECTORY, with this REDIS_URL. {RESTART} "
            "One that is started and not here says why in its log: a model that is not there, memory, another Redis.",
        )
    else:
        yield Finding("ok", "engine", f"serves {', '.join(serving)}")
    for worker, ahead_s in asyncio.run(_worker_clocks()).items():
        if abs(ahead_s) > CLOCK_S:
            yield Finding(
                "warning",
                "clock",
                f"the clock of worker {worker} is {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} "
                "Redis's: times in the ledger and in traces are wrong by as much",
                SET_THE_CLOCK,
            )
    for queue in state["models"]:
        waiting = sum(tier.waiting for tier in queue.tiers)
        if waiting and queue.model not in serving:
            yield Finding(
                "warning", "engine", f"{waiting} requests wait for {queue.model}, which no worker serves",
                "Start a worker for it; they end with an error at their deadline.",
            )  # fmt: skip
        if queue.dead:
            yield Finding(
                "warning", "engine", f"{queue.dead} dead letters of {queue.model}",
                f"python manage.py dead_letters list --model {queue.model}",
            )  # fmt: skip


async def _worker_clocks() -> dict[str, float]:
    operator = OperatorBroker(settings.REDIS_URL, timeout_s=TIMEOUT_S)
    try:
        return {
            worker: ahead_s
            for model in await operator.models()
            for worker, ahead_s in (await operator.worker_clocks(model)).items()
        }
    except BrokerUnavailable:
        return {}  # said by what is asked besides
    finally:
        await operator.aclose()


def background() -> Iterator[Finding]:
    try:
        answers = app.control.ping(timeout=1.0)
    except Exception as error:  # kombu passes on whatever its transport raises
        answers = []
        yield Finding("warning", "celery", f"can't be asked: {mask(str(error))}", "Look at Redis's log.")
    if answers:
        yield Finding("ok", "celery", f"{len(answers)} workers answer")
    else:
        yield Finding(
            "error",
            "celery",
            "no worker answers: usage does not reach the ledger",
            f"Start one: python -m celery -A weir.celery worker. {RESTART}",
        )
    reader = UsageReader(settings.REDIS_URL)
    try:
        pending = reader.pending()
    finally:
        reader.close()
    if pending > _USAGE_MANY:
        yield Finding(
            "warning",
            "celery",
            f"{pending} usage events wait for the ledger",
            "Is beat running (exactly one)? If it is, start more Celery workers.",
        )


def gateway() -> Iterator[Finding]:
    url = f"{settings.BASE_URL}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 - settings allow http(s) alone
            is_ours = response.status == 200 and b'"status"' in response.read(200)
        problem = "" if is_ours else "answers, but is not Weir"
    except (OSError, ValueError) as error:
        problem = f"does not answer: {getattr(error, 'reason', None) or error}"
    if problem:
        yield Finding(
            "error",
            "gateway",
            f"{settings.BASE_URL} {problem}",
            f"Start a gateway, or set WEIR_BASE_URL to the address that clients use. {RESTART}",
        )
    else:
        yield Finding("ok", "gateway", f"{settings.BASE_URL} answers")
