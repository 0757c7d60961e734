"""From a checked prompt to a running generation: reserve, enqueue, listen. Steps 2 to 5 of a request's life."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import msgspec

from engine_worker.broker import BrokerUnavailable, DuplicateRequestId, QueueFull
from inference.errors import ApiError, Conflict, NotAllowed, Overloaded
from inference.models_served import refuse_other_kind
from inference.runtime import Runtime
from inference.services.admission import Admission
from inference.services.decision import Told, as_text
from inference.services.generation import Generation, Ticket
from inference.services.overload import queue_refusal, refuse_early, waits_for_worker
from inference.services.refusal import refusal
from inference.services.submission import Submission
from inference.services.turn import in_turn
from inference.tracing import end_generation_span, span
from tenants.principal import Principal
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.types import Admitted, Refused

_SEED_BITS: Final = 53
"""Of a drawn one: it is told, and readers of JSON that know floats alone keep so many."""


async def submit(runtime: Runtime, principal: Principal, asked: Submission) -> Generation:
    """Queues the generation; its stream is open before, so no token is missed.

    Raises ApiError: InvalidRequest (too long, can never fit), RateLimited, Overloaded, Conflict. Nothing is
    charged and nothing is queued then.
    """
    (await runtime.policy.current()).refuse_in_maintenance()
    refuse_other_kind(asked.model, "embedding" if asked.text_lengths else "generate")
    refuse_early(runtime, principal, asked.model)
    if not principal.allows(*asked.model.names):
        name = asked.model.asked_name
        raise may_not_use(name)
    max_tokens = 0 if asked.text_lengths else asked.max_tokens(principal)
    card = asked.model.card
    sampling = asked.fields.sampling_params(
        max_tokens=max_tokens,
        vocab_size=card.vocab_size,
        seed=random.getrandbits(_SEED_BITS),
        grammar=asked.grammar,
    )
    sampling = asked.with_defaults(sampling)
    admission = Admission(runtime, principal, asked, sampling)
    with _released_on_failure(runtime, principal, asked.request_id):
        stream = await runtime.streams.open(card.model, asked.request_id, is_new=True)
        try:
            with span("reserve"):
                decision, waited = await in_turn(runtime, principal, asked.request_id, admission.reserve)
            if isinstance(decision, Admitted):
                await admission.enqueue(decision, waited)
        except BaseException:
            stream.close()
            end_generation_span(admission.span, None)
            raise
    if isinstance(decision, Refused):
        # Out here: nothing was taken, so nothing is to be released.
        stream.close()
        end_generation_span(admission.span, None)
        _note_refusal(runtime, principal, asked, admission.told(decision, waited))
        raise refusal(decision, request_id=asked.request_id)
    granted = decision.max_output_tokens
    return Generation(
        runtime=runtime,
        ticket=Ticket(
            request_id=asked.request_id,
            model=card.model,
            tenant_id=principal.tenant_public_id,
            reservation_id=asked.request_id,
            lifetime_s=admission.tier.deadline_s,
            price=admission.price,
            take_again=partial(admission.take, granted, runs_already=True),
            waits_for_worker=waits_for_worker(principal.tier, asked.endpoint),
            budget_tokens=granted if granted < max_tokens else None,
        ),
        stream=stream,
        buckets=decision.buckets,
        waited=waited,
        position=admission.position,
        span=admission.span,
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


def may_not_use(model: str) -> NotAllowed:
    """The key is bound to others."""
    return NotAllowed(
        f"This key may not use '{model}'. GET /v1/models lists those that it may.",
        code="model_not_allowed",
        param="model",
    )


def _part_refusal(error: BaseException) -> ApiError | None:
    if isinstance(error, QueueFull):
        return queue_refusal(error)
    if isinstance(error, QuotaUnavailable):
        return Overloaded(
            "Limits can't be checked at the moment. Try again shortly.", code="quota_unavailable"
        )
    if isinstance(error, DuplicateRequestId | ReservationClosed):
        return Conflict(
            "A request with this id exists already. Send it again: it gets another.",
            code="duplicate_request_id",
        )
    if isinstance(error, BrokerUnavailable):
        return Overloaded(
            "The queue can't be reached at the moment. Try again shortly.", code="queue_unavailable"
        )
    return None
