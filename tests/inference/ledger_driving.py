"""Usage events in a stream of their own, and a drain that can be killed at any step."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Sequence
from typing import Any

import redis
from django.conf import settings

from engine_worker.broker import EntryRef, UsageReader, keys
from engine_worker.protocol import UsageEvent, encode
from inference.models import UsageRecord
from inference.services import usage

STEPS = ("read", "commit", "settle", "ack", "never")


def ledger_redis_url() -> str:
    """A database of its own: a drain empties every model's stream."""
    return settings.REDIS_URL + ("&" if "?" in settings.REDIS_URL else "?") + "db=8"


def an_event(tenant_id: str, request_id: str | None = None, **given: Any) -> UsageEvent:
    fields: dict[str, Any] = {
        "request_id": f"req-{uuid.uuid4().hex}" if request_id is None else request_id,
        "tenant_id": tenant_id,
        "model": "tiny",
        "tier": "standard",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "created_at_ms": 1_800_000_000_000,
        "finished_at_ms": 1_800_000_001_500,
    }
    return UsageEvent(**(fields | given))


def publish(events: Sequence[UsageEvent], model: str = "tiny") -> None:
    with redis.Redis.from_url(ledger_redis_url()) as client:
        client.sadd(keys.MODELS, model)
        for event in events:
            client.xadd(keys.model_prefix(model) + "usage", {"e": encode(event)})


def waiting() -> int:
    reader = UsageReader(ledger_redis_url())
    try:
        return reader.pending()
    finally:
        reader.close()


def drain(**given: Any) -> usage.Drained:
    """As an heir would: what others left pending is taken over at once."""
    reader = UsageReader(ledger_redis_url(), abandoned_after_ms=0)
    try:
        return usage.drain_usage(reader=reader, redis_url=ledger_redis_url(), consumer="heir", **given)
    finally:
        reader.close()


class DyingReader:
    """Kills its own process, without any clean-up, right after the named step of the first batch."""

    def __init__(self, step: str) -> None:
        self._reader = UsageReader(ledger_redis_url(), abandoned_after_ms=0)
        self._step = step

    def _die_after(self, step: str) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self, *, consumer: str, count: int, block_ms: int) -> list[tuple[EntryRef, UsageEvent]]:
        entries = self._reader.read(consumer=consumer, count=count, block_ms=block_ms)
        self._die_after("read")
        return entries

    def give_back(self, refs: Sequence[EntryRef], *, consumer: str) -> None:
        self._reader.give_back(refs, consumer=consumer)

    def ack(self, refs: Sequence[EntryRef]) -> None:
        # All that comes before it was done: the rows committed, the quotas settled.
        self._die_after("settle")
        self._reader.ack(refs)
        self._die_after("ack")


def drain_and_die(step: str) -> None:
    """The body of the process that dies."""
    if step == "commit":
        # The first thing after the commit is the settling: die as it begins.
        def die(redis_url: str, rows: Sequence[UsageRecord]) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        usage.settle_rows = die
    usage.drain_usage(reader=DyingReader(step), redis_url=ledger_redis_url(), consumer="mortal")
