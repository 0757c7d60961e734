"""From a checked prompt to a running generation: reserve, enqueue, listen. Steps 2 to 5 of a request's life."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec

from engine_worker.broker import BrokerUnavailable, DuplicateRequestId, QueueFull
from engine_worker.protocol import GenerateRequest
from inference.errors import ApiError, Conflict, NotAllowed, Overloaded
from inference.models_served import refuse_other_kind
from inference.runtime import Runtime
from inference.services.decision import Told, as_text, told
from inference.services.generation import Generation, Ticket
from inference.services.overload import longest_wait_ms, queue_refusal, refuse_early, waits_for_worker
from inference.services.refusal import refusal
from inference.services.submission import Submission, cache_salt
from inference.services.turn import in_turn
from inference.tracing import TRACER, carrier, end_generation_span, start_generation_span
from tenants.pricing import Price, price_at
from tenants.principal import Principal
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.types import Decision, Refused

_LEASE_GRACE_S: Final = 30
"""A reservation outlives its request's deadline by this much: settling comes after the end."""


async def submit(runtime: Runtime, principal: Principal, asked: Submission) -> Generation:
    """Queues the generation; its stream is open before, so no token is missed.

    Raises ApiError: InvalidRequest (too long, can never fit), RateLimited, Overloaded, Conflict. Nothing is
    charged and nothing is queued then.
    """
    (await runtime.policy.current()).refuse_in_maintenance()
    refuse_other_kind(asked.model, "embedding" if asked.text_lengths else "generate")
    refuse_early(runtime, principal, asked.model)
    if not principal.allows(*asked.model.names):
        name = asked.model.alias or asked.model.card.model
        raise NotAllowed(f"This key may not use '{name}'.", code="model_not_allowed", param="model")
    max_tokens = 0 if asked.text_lengths else asked.max_tokens(principal)
    card = asked.model.card
    sampling = asked.fields.sampling_params(
        max_tokens=max_tokens,
        vocab_size=card.vocab_size,
        seed=secrets.randbits(63),
        grammar=asked.grammar,
    )
    sampling = asked.with_defaults(sampling)
    tier = principal.tier
    price: Price | None = None
    created_at_ms = 0
    reservation_id = asked.request_id

    async def take(max_output_tokens: int, *, runs_already: bool = False) -> Decision:
        return await runtime.quotas.reserve(
            reservation_id=reservation_id,
            principal=principal,
            prompt_tokens=len(asked.prompt_token_ids),
            max_output_tokens=max_output_tokens,
            lease_ms=(tier.deadline_s + _LEASE_GRACE_S) * 1000,
            model=card.model,
            price=price,
            accepted_at=datetime.fromtimestamp(created_at_ms / 1000, tz=UTC),
            runs_already=runs_already,
        )

    async def reserve() -> Decision:
        # It is accepted when it is admitted: that moment's price and period.
        nonlocal created_at_ms, price
        created_at_ms = int(time.time() * 1000)
        accepted_at = datetime.fromtimestamp(created_at_ms / 1000, tz=UTC)
        price = price_at(principal.prices.get(card.model, ()), accepted_at)
        return await take(max_tokens * sampling.n)

    with _released_on_failure(runtime, principal, reservation_id), TRACER.start_as_current_span("reserve"):
        decision, waited = await in_turn(runtime, principal, reservation_id, reserve)
    if waited is not None:
        tier = replace(tier, deadline_s=max(1, tier.deadline_s - int(waited.wait_s)))
    reason = told(
        decision,
        at_ms=created_at_ms,
        prompt_tokens=len(asked.prompt_token_ids),
        max_output_tokens=max_tokens * sampling.n,
        price=price,
        waited_ms=round(waited.wait_s * 1000) if waited else 0,
    )
    if isinstance(decision, Refused):
        _note_refusal(runtime, principal, asked, reason)
        raise refusal(decision, request_id=asked.request_id)
    granted = decision.max_output_tokens
    if granted < max_tokens:
        # Only so much is left of a hard budget: the answer ends there.
        sampling = msgspec.structs.replace(
            sampling, max_tokens=granted, min_tokens=min(sampling.min_tokens, granted)
        )
    span = start_generation_span(
        request_id=asked.request_id,
        model=card.model,
        endpoint=asked.endpoint,
        sampling=sampling,
        prompt_tokens=len(asked.prompt_token_ids),
    )
    request = GenerateRequest(
        request_id=asked.request_id,
        model=card.model,
        tenant_id=principal.tenant_public_id,
        tier=tier.name,
        tier_rank=tier.rank,
        prompt_token_ids=asked.prompt_token_ids,
        sampling=sampling,
        created_at_ms=created_at_ms,
        deadline_ms=created_at_ms + tier.deadline_s * 1000,
        reply_channel=runtime.streams.channel,
        reservation_id=reservation_id,
        key_id=principal.key_public_id,
        user_id=principal.user_public_id,
        endpoint=asked.endpoint,
        cache_salt=cache_salt(principal.tenant_public_id, asked.fields.cache_salt or ""),
        adapter=asked.model.adapter,
        is_streamed=asked.is_streamed,
        text_lengths=asked.text_lengths,
        trace=carrier(span),
    )
    with _released_on_failure(runtime, principal, reservation_id):
        stream = await runtime.streams.open(card.model, request.request_id, is_new=True)
        try:
            enqueued = await runtime.broker.enqueue(
                request,
                max_queued=tier.max_queued,
                max_queued_per_tenant=tier.max_queued_per_tenant,
                weight=principal.weight,
                max_wait_ms=longest_wait_ms(tier),
                decision=as_text(reason),
            )
        except BaseException:
            stream.close()
            end_generation_span(span, None)
            raise
    return Generation(
        runtime=runtime,
        ticket=Ticket(
            request_id=request.request_id,
            model=request.model,
            tenant_id=request.tenant_id,
            reservation_id=reservation_id,
            lifetime_s=tier.deadline_s,
            price=price,
            take_again=partial(take, granted, runs_already=True),
            waits_for_worker=waits_for_worker(tier, asked.endpoint),
            budget_tokens=granted if granted < max_tokens else None,
        ),
        stream=stream,
        buckets=decision.buckets,
        waited=waited,
        position=enqueued.position,
        span=span,
    )


def _note_refusal(runtime: Runtime, principal: Principal, asked: Submission, reason: Told) -> None:
    """So that it can be explained; in the background, since the refusal does not depend on it."""
    text = as_text(
        msgspec.structs.replace(
            reason,
            request_id=asked.request_id,
            model=asked.model.card.model,
            key_id=principal.key_public_id or "",
        )
    )

    async def note() -> None:
        with suppress(QuotaUnavailable):
            await runtime.quotas.note_refusal(principal.tenant_public_id, text)

    runtime.spawn(note(), name="note-refusal")


@contextmanager
def _released_on_failure(runtime: Runtime, principal: Principal, reservation_id: str) -> Iterator[None]:
    """Whatever ends the block early, a client that leaves or a Redis that answers too late: nothing stays taken."""
    try:
        yield
    except BaseException as error:
        # One with the same id runs, and what was reserved is its own.
        if not isinstance(error, DuplicateRequestId):
            # A task of the runtime's, because this one may be on its way to be cancelled.
            runtime.spawn(_release(runtime, principal, reservation_id), name="release-reservation")
        if (refused := _part_refusal(error)) is not None:
            raise refused from error
        raise


async def _release(runtime: Runtime, principal: Principal, reservation_id: str) -> None:
    try:
        await runtime.quotas.release(
            tenant_public_id=principal.tenant_public_id, reservation_id=reservation_id
        )
    except QuotaUnavailable:
        return  # it lapses with its lease


def _part_refusal(error: BaseException) -> ApiError | None:
    if isinstance(error, QueueFull):
        return queue_refusal(error)
    if isinstance(error, QuotaUnavailable):
        return Overloaded(
            "Limits can't be checked at the moment. Try again shortly.", code="quota_unavailable"
        )
    if isinstance(error, DuplicateRequestId | ReservationClosed):
        return Conflict("A request with this id exists already.", code="duplicate_request_id")
    if isinstance(error, BrokerUnavailable):
        return Overloaded(
            "The queue can't be reached at the moment. Try again shortly.", code="queue_unavailable"
        )
    return None
