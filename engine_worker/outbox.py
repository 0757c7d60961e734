"""What the worker holds and has not yet published. Pure bookkeeping: no Redis, no engine.

A chunk stays here until a publish that contained it has been answered, so a publish whose effect is
unknown is repeated with the same chunks, and the log skips those that it has.

Inside the engine a request is known as `REQUEST_ID#EPOCH`: a late abort or a late token of a lost
attempt can't touch the attempt that took its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine_worker.broker import Claim, Held, Verdict
from engine_worker.broker.worker import MAX_CHUNKS_PER_CALL
from engine_worker.engine.types import RequestOutput
from engine_worker.protocol import Chunk, EngineError, Finish, FinishReason


@dataclass(slots=True)
class _Owned:
    claim: Claim
    pending: deque[Chunk] = field(default_factory=deque)
    text_before_next: str = ""
    """Text that came without a token: it travels with the next one, for the log counts by tokens."""
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What a publish's answer means for the engine and for the log lines."""

    finished: Sequence[Chunk]
    to_abort: Sequence[str]
    """Engine ids whose client has gone: end them, publish their last chunk."""
    fenced: Sequence[str]
    """Engine ids that belong to another now: end them, publish nothing."""


class Outbox:
    def __init__(self) -> None:
        self._owned: dict[str, _Owned] = {}

    def __len__(self) -> int:
        """Requests held."""
        return len(self._owned)

    @property
    def engine_ids(self) -> list[str]:
        return list(self._owned)

    def hold(self, claim: Claim) -> str:
        """The engine's id for the request."""
        engine_id = f"{claim.request.request_id}#{claim.epoch}"
        self._owned[engine_id] = _Owned(claim)
        return engine_id

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """One step's outputs; those of requests no longer held are dropped."""
        for output in outputs:
            owned = self._owned.get(output.request_id)
            if owned is None:
                continue
            text = owned.text_before_next + output.text
            if not output.token_ids and not output.finish:
                owned.text_before_next = text
                continue
            owned.text_before_next = ""
            owned.pending.append(
                Chunk(
                    request_id=owned.claim.request.request_id,
                    epoch=owned.claim.epoch,
                    seq=output.seq,
                    token_ids=list(output.token_ids),
                    text=text,
                    logprobs=list(output.logprobs) if output.logprobs is not None else None,
                    finish=output.finish,
                )
            )

    def end(self, engine_id: str, reason: str, error: EngineError | None = None) -> None:
        """Ends a request that the engine never had."""
        claim = self._owned[engine_id].claim
        finish = Finish(
            reason=reason,
            prompt_tokens=len(claim.request.prompt_token_ids),
            completion_tokens=len(claim.logged_token_ids),
            error=error,
        )
        self.take([RequestOutput(engine_id, len(claim.logged_token_ids), [], "", finish=finish)])

    def fail(self, engine_id: str, code: str, message: str) -> None:
        self.end(engine_id, FinishReason.ERROR, EngineError(code=code, message=message))

    def batch(self) -> list[Held]:
        """Everything held, each with its chunks to publish: the argument of one publish."""
        return [
            Held(owned.claim.request.request_id, owned.claim.epoch, list(owned.pending)[:MAX_CHUNKS_PER_CALL])
            for owned in self._owned.values()
        ]

    def has_more_than(self, batch: Sequence[Held]) -> bool:
        """Whether chunks are waiting beyond this batch."""
        return sum(len(owned.pending) for owned in self._owned.values()) > sum(
            len(held.chunks) for held in batch
        )

    def settle(self, batch: Sequence[Held], verdicts: Sequence[Verdict]) -> Settled:
        """The answer to `batch`: forgets what is published, and says what to abort."""
        finished: list[Chunk] = []
        to_abort: list[str] = []
        fenced: list[str] = []
        for held, verdict in zip(batch, verdicts, strict=True):
            engine_id = f"{held.request_id}#{held.epoch}"
            owned = self._owned.get(engine_id)
            if owned is None:
                continue
            if verdict is Verdict.FENCED:
                del self._owned[engine_id]
                fenced.append(engine_id)
                continue
            for _ in held.chunks:
                owned.pending.popleft()
            if held.chunks and held.chunks[-1].finish:
                del self._owned[engine_id]
                finished.append(held.chunks[-1])
            elif verdict is Verdict.CANCELLED and not owned.is_aborted:
                owned.is_aborted = True
                to_abort.append(engine_id)
        return Settled(finished=finished, to_abort=to_abort, fenced=fenced)

    def drop_all(self) -> list[Held]:
        """Forgets every request, and says which they were."""
        dropped = [replace(held, chunks=()) for held in self.batch()]
        self._owned.clear()
        return dropped
