"""A generation under way, as its client's connection holds it: chunks out, and one end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import msgspec
import structlog
from opentelemetry.trace import INVALID_SPAN, Span

from engine_worker.broker import BrokerUnavailable
from engine_worker.protocol import Chunk, Finish, FinishReason, charged_prompt_tokens
from inference.errors import (
    ApiError,
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    NotAllowed,
    Overloaded,
)
from inference.models_served import refused_in_the_queue
from inference.runtime import Runtime
from inference.services.refusal import bucket_headers
from inference.services.turn import Waited
from inference.streams import StreamLost, TokenStream
from inference.tracing import end_generation_span
from tenants.auth import TenantSuspended
from tenants.pricing import Price
from tenants.quotas.types import BucketState, Settlement

log = structlog.get_logger(__name__)

BUDGET_EXCEEDED: Final = "budget_exceeded"
"""The finish reason that clients see when a hard budget ended the answer."""
WAITED_IN_VAIN: Final = "waited_in_vain"
"""The code of the error of who was ended in the queue."""
_END_WAIT_S: Final = 15.0
"""So long is a cancelled generation's last chunk waited for, to settle at once; the ledger settles it anyway."""
_OVERDUE_S: Final = 10.0
"""So long after its deadline a generation that nobody ends is given up."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a connection must know of its generation."""

    request_id: str
    model: str
    tenant_id: str
    """The tenant's public id."""
    reservation_id: str
    """Empty: nothing to settle here."""
    lifetime_s: float
    """From now to its deadline."""
    price: Price | None = None
    take_again: Callable[[], Awaitable[object]] | None = None
    """Reserves what it holds once more, where Redis has forgotten it."""
    waits_for_worker: bool = False
    """However long that takes, unless its model is unloaded. Others are told when that has had none for a while."""
    budget_tokens: int | None = None
    """Where a hard budget had room for fewer output tokens than were asked for: so many."""


class Generation:
    """`async with generation: while chunk := await generation.next(...)`.

    Leaving before the end cancels it at the engine. What was generated is settled exactly, here at the
    last chunk and again, changing nothing, when the usage event reaches the ledger.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        ticket: Ticket,
        stream: TokenStream,
        buckets: tuple[BucketState, ...] = (),
        waited: Waited | None = None,
        position: int = 0,
        span: Span = INVALID_SPAN,
    ) -> None:
        self.ticket = ticket
        self.buckets = buckets
        self.waited = waited
        self.position = position
        self.finish: Finish | None = None
        self.queued_ms: int | None = None
        """How long it waited for a worker; None before its first chunk."""
        self._runtime = runtime
        self._stream = stream
        self._span = span
        self._has_left = False
        self._give_up_at = asyncio.get_running_loop().time() + ticket.lifetime_s + _OVERDUE_S
        self._is_barred = False
        runtime.tenants.add(self)
        runtime.workers.add(self)
        if ticket.take_again is not None:
            runtime.reservations.add(self)

    def headers(self) -> dict[str, str]:
        """What its client hears of the limits, and of its turns where they are known by now."""
        headers = bucket_headers(self.buckets)
        if self.waited is not None:
            headers["x-weir-place"] = str(self.waited.place)
            headers["x-weir-waited-ms"] = str(round(self.waited.wait_s * 1000))
        return headers | self.queue_header()

    def queue_header(self) -> dict[str, str]:
        return {} if self.queued_ms is None else {"x-weir-queue-ms": str(self.queued_ms)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    async def next(self, timeout_s: float) -> Chunk | None:
        """The next chunk, or None when none came within `timeout_s`; after the end StopAsyncIteration.

        Raises ApiError when the rest will not come, or the end is not a good one.
        """
        try:
            chunk = await self._stream.next(timeout_s)
        except StreamLost as error:
            log.warning("stream_lost", request_id=self.ticket.request_id, reason=str(error))
            raise GenerationFailed(
                f"The answer broke off: {error}. Try again.", code="stream_lost"
            ) from error
        if chunk is None:
            if asyncio.get_running_loop().time() > self._give_up_at:
                overdue = DeadlineExceeded(
                    "The generation did not end by its deadline. Ask for fewer tokens, or try again later."
                )
                overdue.is_end = True
                raise overdue
            return None
        return self._seen(chunk)

    async def give_up_without_worker(self) -> None:
        """Where the last look found none to wait for. Its end comes as a chunk then, for the record as for the client;
        unless a worker has it after all."""
        try:
            self._runtime.models.refuse_without_worker(
                self.ticket.model,
                has_begun=self._stream.next_seq > 0,
                waits_for_worker=self.ticket.waits_for_worker,
            )
        except ApiError as error:
            with suppress(BrokerUnavailable):  # the next look tries again
                await self._runtime.broker.refuse(
                    self.ticket.model, self.ticket.request_id, code=error.code, message=error.message
                )

    def take_ready(self) -> Chunk | None:
        """The next chunk if it is here already: what came together can be told together."""
        chunk = self._stream.take_ready()
        return None if chunk is None else self._seen(chunk)

    def _seen(self, chunk: Chunk) -> Chunk:
        if self.queued_ms is None:
            self.queued_ms = chunk.queued_ms
        if chunk.finish is not None:
            finish = self._named_end(chunk.finish)
            if finish is not chunk.finish:
                chunk = msgspec.structs.replace(chunk, finish=finish)
            self.finish = finish
            end_generation_span(self._span, finish)
            self._stream.close()
            self._settle(finish)
        return chunk

    def _named_end(self, finish: Finish) -> Finish:
        """The engine stopped at the length it was given; the client hears that it was the budget's."""
        within = self.ticket.budget_tokens
        if finish.reason == FinishReason.LENGTH and within is not None and finish.completion_tokens >= within:
            return msgspec.structs.replace(finish, reason=BUDGET_EXCEEDED)
        return finish

    @property
    def is_cut_short(self) -> bool:
        """The gateway is being stopped, and this has not ended."""
        return self._runtime.is_stopping and self.is_running

    @property
    def is_running(self) -> bool:
        return self.finish is None and not self._has_left

    def bar(self) -> None:
        """The tenant may not go on: ends it at the engine, and its client hears why. What was made is charged."""
        if self.is_running and not self._is_barred:
            self._is_barred = True
            self._runtime.spawn(self._stop_at_engine(), name="bar-generation")

    async def _stop_at_engine(self) -> None:
        try:
            await self._runtime.broker.cancel(self.ticket.model, self.ticket.request_id)
        except BrokerUnavailable:
            self._is_barred = False  # asked again by the next look

    def failure(self) -> ApiError | None:
        """What to tell the client about an end that is neither `stop` nor `length`."""
        error = self._failure()
        if error is not None:
            error.is_end = True
        return error

    def _failure(self) -> ApiError | None:
        finish = self.finish
        assert finish is not None
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH, BUDGET_EXCEEDED):
            return None
        if finish.reason == FinishReason.DEADLINE:
            if finish.completion_tokens == 0:
                return Overloaded(
                    "The request waited as long as its tier promises, and no worker had room. Try again later.",
                    code=WAITED_IN_VAIN,
                    retry_after_ms=5000,
                )
            return DeadlineExceeded(
                "The request's deadline passed before the answer was complete. Ask for fewer tokens, or, where "
                "x-weir-deadline-s cut its time, give it more."
            )
        if finish.reason == FinishReason.CANCELLED and self._is_barred:
            return NotAllowed(TenantSuspended.message, code=TenantSuspended.code)
        if finish.reason == FinishReason.CANCELLED:
            return Cancelled()
        if finish.error is not None and finish.error.code == "invalid_request":
            return InvalidRequest(finish.error.message)
        if finish.error is not None:
            refused = refused_in_the_queue(finish.error.code, finish.error.message)
            if refused is not None:
                return refused
        if finish.error is None:
            return _engine_failure("The engine failed while generating this answer.", "engine_failed")
        return _engine_failure(finish.error.message, finish.error.code)

    def leave(self) -> None:
        """The client is gone or satisfied. Idempotent; what must still be done is done in the background."""
        if self.finish is None and not self._has_left:
            self._has_left = True
            end_generation_span(self._span, None)
            self._runtime.spawn(self._cancel(), name="cancel-generation")

    def detach(self, grace_s: float) -> None:
        """The connection dropped: whoever resumes within `grace_s`, on any gateway, finds it going on.

        After that it is cancelled. The ledger settles it then.
        """
        if self.is_running:
            self.hand_over()
            self._runtime.detached.hold(self.ticket.model, self.ticket.request_id, grace_s)

    def hand_over(self) -> None:
        """It goes on, for who reads it on at another gateway."""
        if self.is_running:
            self._has_left = True
            end_generation_span(self._span, None)
            self._stream.close()

    async def _cancel(self) -> None:
        """Cancels at the engine and waits for the last chunk, which says how much is to be settled."""
        try:
            await self._runtime.broker.cancel(self.ticket.model, self.ticket.request_id)
            loop = asyncio.get_running_loop()
            give_up_at = loop.time() + _END_WAIT_S
            while (left := give_up_at - loop.time()) > 0:
                chunk = await self._stream.next(left)
                if chunk is not None and chunk.finish is not None:
                    self.finish = chunk.finish
                    self._settle(chunk.finish)
                    return
        except (BrokerUnavailable, StreamLost, StopAsyncIteration) as error:
            log.warning("cancel_incomplete", request_id=self.ticket.request_id, reason=str(error))
        finally:
            self._stream.close()

    def _settle(self, finish: Finish) -> None:
        if not self.ticket.reservation_id:
            return  # taken up from another gateway: the ledger settles it
        prompt_tokens = charged_prompt_tokens(
            finish_reason=finish.reason,
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
        )
        cost = 0
        if self.ticket.price is not None:
            cost = self.ticket.price.cost_microusd(
                prompt_tokens=prompt_tokens,
                cached_tokens=min(finish.cached_tokens, prompt_tokens),
                completion_tokens=finish.completion_tokens,
            )
        self._runtime.settlements.add(
            Settlement(
                tenant_public_id=self.ticket.tenant_id,
                reservation_id=self.ticket.reservation_id,
                prompt_tokens=prompt_tokens,
                completion_tokens=finish.completion_tokens,
                cost_microusd=cost,
            )
        )


def _engine_failure(message: str, code: str) -> GenerationFailed:
    """In a sentence: engines say it as a log does."""
    said = f"{message[:1].upper()}{message[1:].removesuffix('.')}"
    return GenerationFailed(
        f"{said}. Try again; where that does not help, tell the operator the x-request-id.", code=code
    )
