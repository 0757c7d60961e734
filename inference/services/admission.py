"""One request's way in: what it takes of its tenant's limits, and its place in the queue, in one call where it can."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import msgspec
from opentelemetry.context import Context, get_current
from opentelemetry.trace import INVALID_SPAN, Span

from engine_worker.broker import Enqueued, Terms, entry_of
from engine_worker.protocol import GenerateRequest, SamplingParams
from inference.runtime import Runtime
from inference.services.decision import Told, as_text, told, told_beforehand
from inference.services.overload import longest_wait_ms
from inference.services.submission import Submission, cache_salt
from inference.services.turn import Waited
from inference.tracing import carrier, start_generation_span
from tenants.pricing import Price, price_at
from tenants.principal import Principal, TierSpec
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.types import Admitted, Decision, Then

_LEASE_GRACE_S: Final = 30
"""A reservation outlives its request's deadline by this much: settling comes after the end."""


@dataclass(slots=True)
class Admission:
    runtime: Runtime
    principal: Principal
    asked: Submission
    sampling: SamplingParams
    tier: TierSpec = field(init=False)
    """With what is left of its deadline after a wait for its turn."""
    price: Price | None = None
    created_at_ms: int = 0
    """It is accepted when it is admitted: that moment's price and period."""
    context: Context = field(default_factory=get_current)
    """Whose span the generation's is below: not the reservation's, which may be the current one when it begins."""
    span: Span = INVALID_SPAN
    position: int = 0
    """Where it was queued."""
    _is_queued: bool = False

    def __post_init__(self) -> None:
        self.tier = self.principal.tier

    @property
    def whole(self) -> int:
        """Output tokens of all choices."""
        return self.sampling.max_tokens * self.sampling.n

    async def reserve(self) -> Decision:
        """Takes all of it, and queues the request in the same call unless something has to be known in between: how
        long it waited for its turn, or how much a hard budget has left.

        Raises QuotaUnavailable, ReservationClosed, QueueFull, DuplicateRequestId.
        """
        self.created_at_ms = int(time.time() * 1000)
        prices = self.principal.prices.get(self.asked.model.card.model, ())
        self.price = price_at(prices, self._accepted_at)
        if self.principal.waits_for_rate or not self.runtime.quotas.can_go_on:
            return await self.take(self.whole)
        request = self._request(self.sampling)
        entry = entry_of(request, **self._terms(as_text(self._told_beforehand())))
        then = Then(entry.script, entry.key, entry.args)
        try:
            decision = await self.take(self.whole, then=then)
        except (QuotaUnavailable, asyncio.CancelledError):
            self.runtime.broker.undo(request)
            raise
        if then.reply is not None:
            self._note(self.runtime.broker.entered(entry, then.reply))
        return decision

    async def take(
        self, max_output_tokens: int, *, runs_already: bool = False, then: Then | None = None
    ) -> Decision:
        return await self.runtime.quotas.reserve(
            reservation_id=self.asked.request_id,
            principal=self.principal,
            prompt_tokens=len(self.asked.prompt_token_ids),
            max_output_tokens=max_output_tokens,
            lease_ms=(self.tier.deadline_s + _LEASE_GRACE_S) * 1000,
            model=self.asked.model.card.model,
            price=self.price,
            accepted_at=self._accepted_at,
            runs_already=runs_already,
            then=then,
        )

    async def enqueue(self, decision: Admitted, waited: Waited | None) -> None:
        """Unless the reservation has. Raises BrokerUnavailable, QueueFull, DuplicateRequestId."""
        if self._is_queued:
            return
        if waited is not None:
            self.tier = replace(self.tier, deadline_s=max(1, self.tier.deadline_s - int(waited.wait_s)))
        sampling, granted = self.sampling, decision.max_output_tokens
        if granted < sampling.max_tokens:
            # Only so much is left of a hard budget: the answer ends there.
            sampling = msgspec.structs.replace(
                sampling, max_tokens=granted, min_tokens=min(sampling.min_tokens, granted)
            )
        request, reason = self._request(sampling), as_text(self.told(decision, waited))
        self._note(await self.runtime.broker.enqueue(request, **self._terms(reason)))

    def _note(self, enqueued: Enqueued) -> None:
        self.position, self._is_queued = enqueued.position, True

    def told(self, decision: Decision, waited: Waited | None) -> Told:
        return told(
            decision,
            at_ms=self.created_at_ms,
            prompt_tokens=len(self.asked.prompt_token_ids),
            max_output_tokens=self.whole,
            price=self.price,
            seed=self._seed,
            waited_ms=round(waited.wait_s * 1000) if waited else 0,
        )

    def _told_beforehand(self) -> Told:
        model = self.asked.model.card.model
        return told_beforehand(
            (limit for limit in self.principal.limits if limit.binds(model)),
            at_ms=self.created_at_ms,
            prompt_tokens=len(self.asked.prompt_token_ids),
            max_output_tokens=self.whole,
            price=self.price,
            seed=self._seed,
        )

    @property
    def _seed(self) -> int | None:
        return None if self.asked.text_lengths else self.sampling.seed

    def _request(self, sampling: SamplingParams) -> GenerateRequest:
        asked, principal, tier = self.asked, self.principal, self.tier
        card = asked.model.card
        self.span = start_generation_span(
            request_id=asked.request_id,
            model=card.model,
            endpoint=asked.endpoint,
            sampling=sampling,
            prompt_tokens=len(asked.prompt_token_ids),
            context=self.context,
        )
        return GenerateRequest(
            request_id=asked.request_id,
            model=card.model,
            tenant_id=principal.tenant_public_id,
            tier=tier.name,
            tier_rank=tier.rank,
            prompt_token_ids=asked.prompt_token_ids,
            sampling=sampling,
            created_at_ms=self.created_at_ms,
            deadline_ms=self.created_at_ms + tier.deadline_s * 1000,
            reply_channel=self.runtime.streams.channel,
            reservation_id=asked.request_id,
            key_id=principal.key_public_id,
            user_id=principal.user_public_id,
            endpoint=asked.endpoint,
            cache_salt=cache_salt(principal.tenant_public_id, asked.fields.cache_salt or ""),
            adapter=asked.model.adapter,
            is_streamed=asked.is_streamed,
            continues_text=asked.continues_text,
            text_lengths=asked.text_lengths,
            trace=carrier(self.span),
        )

    def _terms(self, decision: str) -> Terms:
        return {
            "max_queued": self.tier.max_queued,
            "max_queued_per_tenant": self.tier.max_queued_per_tenant,
            "weight": self.principal.weight,
            "max_wait_ms": longest_wait_ms(self.tier),
            "decision": decision,
        }

    @property
    def _accepted_at(self) -> datetime:
        return datetime.fromtimestamp(self.created_at_ms / 1000, tz=UTC)
