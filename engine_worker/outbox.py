"""What the worker holds and has not yet published. Pure bookkeeping: no Redis, no engine.

A chunk stays here until a publish that contained it has been answered, so a publish whose effect is
unknown is repeated with the same chunks, and the log skips those that it has.

What nobody reads token by token is published at its end, and before when there is something as old as `HOLD_S`, or
`FIRST_HOLD_S` at its beginning: one chunk each. That is often enough for the fair order, for a resumed stream, and
for a worker that takes over, and spares the server and the gateway a chunk per step.

Inside the engine a request is known as `REQUEST_ID#EPOCH`: a late abort or a late token of a lost
attempt can't touch the attempt that took its place. One of several choices is `REQUEST_ID#EPOCH/INDEX`.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import msgspec

from engine_worker.broker import Claim, Held, Verdict
from engine_worker.broker.worker import MAX_CHUNKS_PER_CALL
from engine_worker.choices import choice_id, ended_choices, joint_finish
from engine_worker.engine.types import EngineRequest, RequestOutput
from engine_worker.protocol import ChoiceEnd, Chunk, EngineError, Finish, FinishReason, PositionLogprobs

HOLD_S: Final = 0.25
"""So old may a chunk get that nobody waits for."""
FIRST_HOLD_S: Final = 0.01
"""And so old the first one, by which the time to the first token is told. What is whole sooner is one chunk."""


@dataclass(slots=True)
class _Owned:
    claim: Claim
    num_tokens: int
    """Output tokens so far, of all choices, those of earlier attempts included."""
    pending: deque[Chunk] = field(default_factory=deque)
    num_sent: int = 0
    """So many of them went out in a publish that has not been answered: those may not change any more."""
    held_since_s: float = 0.0
    """When the first of them came."""
    was_published: bool = False
    text_before_next: dict[int, str] = field(default_factory=dict)
    """By choice, text that came without a token: it travels with the next one, for the log counts by tokens."""
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    finishes: list[Finish] = field(default_factory=list)
    followers: list[EngineRequest] = field(default_factory=list)
    """Choices that begin once the first one has its first token."""
    has_begun: bool = False
    is_aborted: bool = False

    @property
    def n(self) -> int:
        return self.claim.request.sampling.n

    def add(self, chunk: Chunk, now_s: float) -> None:
        if not self.pending:
            self.held_since_s = now_s
        self.pending.append(chunk)

    def join(self) -> None:
        """What has not been sent yet becomes as few chunks as it can, where nobody would see the difference."""
        if self.claim.request.is_streamed or len(self.pending) - self.num_sent < 2:
            return
        unsent = [self.pending.pop() for _ in range(len(self.pending) - self.num_sent)][::-1]
        together = [unsent[0]]
        for before, chunk in pairwise(unsent):
            if not _may_follow_in_one(before, chunk):
                self.pending.append(_as_one(together))
                together = []
            together.append(chunk)
        self.pending.append(_as_one(together))

    def is_due(self, now_s: float) -> bool:
        """Whether there is something that is to be published now."""
        if not self.pending:
            return False
        return (
            self.claim.request.is_streamed
            or now_s - self.held_since_s >= (HOLD_S if self.was_published else FIRST_HOLD_S)
            or self.num_sent > 0
            or self.pending[-1].finish is not None
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """What a publish's answer means for the engine and for the log lines."""

    finished: Sequence[Chunk]
    to_abort: Sequence[str]
    """Requests whose client has gone: end them, publish their last chunk."""
    fenced: Mapping[str, Sequence[str]]
    """Requests that belong to another now, and their ids in the engine: end them, publish nothing."""


class Outbox:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owned: dict[str, _Owned] = {}

    def __len__(self) -> int:
        """Requests held."""
        return len(self._owned)

    def to_put_aside(self, slots: int) -> tuple[int, int]:
        """How many better requests than the worst class held would displace one of it, and that class."""
        classes = [owned.claim.tier_class for owned in self._owned.values()]
        worst = max(classes, default=0)
        better = sum(tier_class < worst for tier_class in classes)
        return max(0, slots - better), worst

    @property
    def engine_ids(self) -> list[str]:
        return list(self._owned)

    def holds(self, claim: Claim) -> bool:
        return f"{claim.request.request_id}#{claim.epoch}" in self._owned

    def hold(self, claim: Claim) -> str:
        """The engine's id for the request."""
        engine_id = f"{claim.request.request_id}#{claim.epoch}"
        self._owned[engine_id] = _Owned(
            claim, num_tokens=len(claim.logged_token_ids), ends=ended_choices(claim.log)
        )
        return engine_id

    def follow(self, engine_id: str, choices: Sequence[EngineRequest]) -> None:
        """These are to be added to the engine when `take_followers` gives them."""
        self._owned[engine_id].followers = list(choices)

    def take_followers(self) -> list[tuple[str, EngineRequest]]:
        """Choices whose time has come, each with the id of its request. Each is given once."""
        taken = []
        for engine_id, owned in self._owned.items():
            if owned.followers and owned.has_begun:
                taken += [(engine_id, choice) for choice in owned.followers]
                owned.followers = []
        return taken

    def in_engine(self, engine_id: str) -> list[str]:
        """What the engine knows the request, or each of its choices, by."""
        return _in_engine(engine_id, self._owned[engine_id])

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """One step's outputs; those of requests no longer held are dropped."""
        for output in outputs:
            if (owned := self._owned.get(output.request_id)) is not None:
                self._take(owned, 0, output)
                continue
            engine_id, _, index = output.request_id.rpartition("/")
            if (owned := self._owned.get(engine_id)) is not None:
                self._take(owned, int(index), output)

    def _take(self, owned: _Owned, index: int, output: RequestOutput) -> None:
        is_first, owned.has_begun = not owned.has_begun, True
        text = owned.text_before_next.pop(index, "") + output.text
        if not output.token_ids and not output.finish:
            owned.text_before_next[index] = text
            return
        finish, choice_end = output.finish, None
        seq = output.seq
        if owned.n > 1:
            seq = owned.num_tokens
            if output.finish is not None:
                choice_end = ChoiceEnd(output.finish.reason, output.finish.stop_reason)
                owned.ends[index] = choice_end
                owned.finishes.append(output.finish)
            finish = None
            if len(owned.ends) == owned.n:
                completion_tokens = seq + len(output.token_ids)
                finish = joint_finish(owned.ends.values(), owned.finishes, completion_tokens)
        owned.num_tokens += len(output.token_ids)
        owned.add(
            Chunk(
                request_id=owned.claim.request.request_id,
                epoch=owned.claim.epoch,
                seq=seq,
                token_ids=list(output.token_ids),
                text=text,
                logprobs=list(output.logprobs) if output.logprobs is not None else None,
                finish=finish,
                index=index,
                choice_end=choice_end,
                prompt_logprobs=list(output.prompt_logprobs) if output.prompt_logprobs is not None else None,
                queued_ms=owned.claim.queued_ms if is_first else None,
                embedding=None if output.embedding is None else b64encode(output.embedding).decode(),
            ),
            self._clock(),
        )

    def end(self, engine_id: str, reason: str, error: EngineError | None = None) -> None:
        """Ends a request that the engine never had, or not as a whole."""
        owned = self._owned[engine_id]
        finish = Finish(
            reason=reason,
            # Without a token nothing is known to have been computed.
            prompt_tokens=len(owned.claim.request.prompt_token_ids) if owned.num_tokens else 0,
            completion_tokens=owned.num_tokens,
            error=error,
        )
        owned.followers = []
        owned.pending.append(
            Chunk(
                request_id=owned.claim.request.request_id,
                epoch=owned.claim.epoch,
                seq=owned.num_tokens,
                finish=finish,
            )
        )

    def fail(self, engine_id: str, code: str, message: str) -> None:
        self.end(engine_id, FinishReason.ERROR, EngineError(code=code, message=message))

    def batch(self, *, everything: bool = False) -> list[Held]:
        """Everything held, each with its chunks to publish: the argument of one publish.

        With `everything` also those that could wait a little.
        """
        now_s = self._clock()
        held = []
        for owned in self._owned.values():
            chunks: list[Chunk] = []
            if everything or owned.is_due(now_s):
                owned.join()
                chunks = list(owned.pending)[:MAX_CHUNKS_PER_CALL]
                owned.num_sent = max(owned.num_sent, len(chunks))
            held.append(Held(owned.claim.request.request_id, owned.claim.epoch, chunks))
        return held

    @property
    def has_due(self) -> bool:
        """Whether chunks are waiting to be published now."""
        now_s = self._clock()
        return any(owned.is_due(now_s) for owned in self._owned.values())

    @property
    def has_chunks(self) -> bool:
        return any(owned.pending for owned in self._owned.values())

    def settle(self, batch: Sequence[Held], verdicts: Sequence[Verdict]) -> Settled:
        """The answer to `batch`: forgets what is published, and says what to abort."""
        finished: list[Chunk] = []
        to_abort: list[str] = []
        fenced: dict[str, list[str]] = {}
        for held, verdict in zip(batch, verdicts, strict=True):
            engine_id = f"{held.request_id}#{held.epoch}"
            owned = self._owned.get(engine_id)
            if owned is None:
                continue
            if verdict is Verdict.FENCED:
                fenced[engine_id] = _in_engine(engine_id, owned)
                del self._owned[engine_id]
                continue
            for _ in held.chunks:
                owned.pending.popleft()
            if held.chunks:
                owned.num_sent = 0
                owned.was_published = True
                owned.held_since_s = self._clock()  # of what came meanwhile, if anything did
            if held.chunks and held.chunks[-1].finish:
                del self._owned[engine_id]
                finished.append(held.chunks[-1])
            elif verdict is Verdict.CANCELLED and not owned.is_aborted:
                owned.is_aborted = True
                for choice in owned.followers:  # those will never begin
                    owned.ends[int(choice.request_id.rpartition("/")[2])] = ChoiceEnd(FinishReason.CANCELLED)
                owned.followers = []
                to_abort.append(engine_id)
        return Settled(finished=finished, to_abort=to_abort, fenced=fenced)

    def drop_all(self) -> list[Held]:
        """Forgets every request, and says which they were."""
        dropped = [replace(held, chunks=()) for held in self.batch()]
        self._owned.clear()
        return dropped


def _may_follow_in_one(before: Chunk, chunk: Chunk) -> bool:
    return before.index == chunk.index and before.choice_end is None and before.finish is None


def _as_one(chunks: Sequence[Chunk]) -> Chunk:
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first
    return msgspec.structs.replace(
        last,
        seq=first.seq,
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        text="".join(chunk.text for chunk in chunks),
        logprobs=_joined(chunk.logprobs for chunk in chunks),
        prompt_logprobs=_joined(chunk.prompt_logprobs for chunk in chunks),
        queued_ms=first.queued_ms,
    )


def _joined(told: Iterable[list[PositionLogprobs] | None]) -> list[PositionLogprobs] | None:
    lists = [positions for positions in told if positions is not None]
    return [position for positions in lists for position in positions] if lists else None


def _in_engine(engine_id: str, owned: _Owned) -> list[str]:
    return [engine_id] if owned.n == 1 else [choice_id(engine_id, index) for index in range(owned.n)]
