"""A request on its way into the queue: the script that puts it there, and what that is told."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final, Required, TypedDict, Unpack

import msgspec

from engine_worker.broker import keys, scripts
from engine_worker.broker.full_queues import Line
from engine_worker.protocol import GenerateRequest, encode

RETENTION_MS: Final = 10 * 60 * 1000
"""How long a finished request's log can still be read, and its id is refused to others."""

MAX_ATTEMPTS: Final = 3
"""A request that has taken so many workers with it is not given to another."""


class Terms(TypedDict, total=False):
    """On which a request is queued."""

    max_queued: Required[int]
    """In its tier at most."""
    max_queued_per_tenant: Required[int]
    weight: int
    """The tenant's against others of its tier; 1 where none is given."""
    max_wait_ms: int | None
    """The longest wait that is promised: with nearly as much ahead the request is refused, after half of it the
    request may pass better tiers, and after all of it it is ended; None takes the time until the deadline."""
    retention_ms: int
    max_attempts: int
    decision: str
    """Why it was admitted; goes into the usage event as it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """For who makes the call."""

    script: str
    key: str
    """The only one."""
    args: tuple[str | bytes | int, ...]
    """The last one is the decision."""
    line: Line
    longest_ms: int


def entry_of(request: GenerateRequest, **terms: Unpack[Terms]) -> Entry:
    lifetime_ms = request.deadline_ms - request.created_at_ms
    max_wait_ms = terms.get("max_wait_ms")
    longest_ms = lifetime_ms if max_wait_ms is None else max_wait_ms
    args = (
        request.request_id,
        encode(request),
        _usage_fields(request),
        request.tier_rank,
        request.tenant_id,
        len(request.prompt_token_ids),
        lifetime_ms,
        request.reply_channel,
        terms["max_queued"],
        terms["max_queued_per_tenant"],
        terms.get("retention_ms", RETENTION_MS),
        terms.get("max_attempts", MAX_ATTEMPTS),
        f"{random.getrandbits(64):016x}",
        terms.get("weight", 1),
        longest_ms,
        request.adapter,
        request.sampling.max_tokens * request.sampling.n,
        terms.get("decision", ""),
    )
    line = (request.model, request.tier_rank, request.tenant_id)
    return Entry(scripts.load("enqueue").text, keys.model_prefix(request.model), args, line, longest_ms)


def _usage_fields(request: GenerateRequest) -> bytes:
    """What the ledger will want to know and only the gateway does; the script that ends the request adds the rest."""
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "tenant_id": request.tenant_id,
        "model": request.model,
        "tier": request.tier,
        "prompt_tokens": len(request.prompt_token_ids),
        "key_id": request.key_id,
        "user_id": request.user_id,
        "endpoint": request.endpoint,
        "reservation_id": request.reservation_id,
        "v": request.v,
    }
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})
