"""What is published when, and that it is the same tokens whatever was lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.broker import Claim, Held, Verdict
from engine_worker.engine.types import RequestOutput
from engine_worker.outbox import FIRST_HOLD_S, HOLD_S, Outbox
from engine_worker.protocol import (
    Chunk,
    Finish,
    GenerateRequest,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Log:
    """Takes a publish as the broker's script does: what it has is skipped, a hole is never written."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    def publish(self, batch: Sequence[Held]) -> list[Verdict]:
        for chunk in (chunk for held in batch for chunk in held.chunks):
            if chunk.seq == len(self.tokens) and (chunk.token_ids or chunk.finish):
                self.chunks.append(chunk)
            else:
                assert chunk.seq + len(chunk.token_ids) <= len(self.tokens), "fenced: ahead of the log"
        return [Verdict.OK for _ in batch]


def holding(clock: Clock, **given: Any) -> tuple[Outbox, str]:
    request = GenerateRequest(
        request_id="r1", model="m", tenant_id="t", tier="standard", tier_rank=1, prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=100), created_at_ms=0, deadline_ms=1, reply_channel="c", **given,
    )  # fmt: skip
    outbox = Outbox(clock)
    claim = Claim(request, 1, 1, 1000, (), tier_class=0, counter=0.0)
    return outbox, outbox.hold(claim)


def step(engine_id: str, seq: int, *, ends: bool = False) -> RequestOutput:
    finish = Finish(reason="length", prompt_tokens=1, completion_tokens=seq + 1) if ends else None
    logprobs = [PositionLogprobs(TokenLogprob(seq, -0.5))]
    return RequestOutput(engine_id, seq, [seq], f"<{seq}>", logprobs=logprobs, finish=finish)


def test_a_stream_gets_each_step_as_a_chunk():
    outbox, engine_id = holding(Clock())
    outbox.take([step(engine_id, 0)])
    outbox.take([step(engine_id, 1)])
    assert [chunk.token_ids for chunk in outbox.batch()[0].chunks] == [[0], [1]]


def test_a_whole_answer_that_is_there_at_once_is_one_chunk():
    outbox, engine_id = holding(Clock(), is_streamed=False)
    for seq in range(5):
        assert not outbox.has_due
        outbox.take([step(engine_id, seq, ends=seq == 4)])
    (chunk,) = outbox.batch()[0].chunks
    assert (chunk.seq, chunk.token_ids, chunk.text) == (0, [0, 1, 2, 3, 4], "<0><1><2><3><4>")


def test_a_whole_answer_is_published_with_its_first_token_then_as_it_gets_old_and_at_its_end():
    clock = Clock()
    outbox, engine_id = holding(clock, is_streamed=False)
    outbox.take([step(engine_id, 0)])
    clock.now += FIRST_HOLD_S
    first = outbox.batch()
    assert [chunk.token_ids for chunk in first[0].chunks] == [[0]]
    outbox.settle(first, [Verdict.OK])

    outbox.take([step(engine_id, 1)])
    outbox.take([step(engine_id, 2)])
    assert outbox.batch()[0].chunks == []  # held, and yet its lease is renewed
    assert not outbox.has_due  # so that nobody publishes in a busy loop
    assert outbox.has_chunks
    clock.now += HOLD_S
    assert outbox.has_due
    second = outbox.batch()
    (chunk,) = second[0].chunks
    assert (chunk.seq, chunk.token_ids, chunk.text) == (1, [1, 2], "<1><2>")
    assert [position.chosen.token_id for position in chunk.logprobs or ()] == [1, 2]
    outbox.settle(second, [Verdict.OK])

    outbox.take([step(engine_id, 3)])
    outbox.take([step(engine_id, 4, ends=True)])
    last = outbox.batch()
    (chunk,) = last[0].chunks
    assert (chunk.seq, chunk.token_ids) == (3, [3, 4])
    assert chunk.finish is not None
    assert outbox.settle(last, [Verdict.OK]).finished == [chunk]
    assert len(outbox) == 0


def test_a_worker_that_hands_back_leaves_nothing_behind():
    outbox, engine_id = holding(Clock(), is_streamed=False)
    outbox.take([step(engine_id, 0)])
    batch = outbox.batch(everything=True)
    outbox.settle(batch, [Verdict.OK])
    outbox.take([step(engine_id, 1)])
    assert [chunk.token_ids for chunk in outbox.batch(everything=True)[0].chunks] == [[1]]


@given(
    st.booleans(),
    st.lists(st.sampled_from(["step", "answered", "lost before", "lost after", "wait"]), max_size=60),
)
def test_whatever_is_lost_the_log_has_every_token_once(is_streamed: bool, script: list[str]):
    clock = Clock()
    outbox, engine_id = holding(clock, is_streamed=is_streamed)
    log, made = Log(), 0
    for what in [*script, "end", "answered"]:
        if what in ("step", "end"):
            outbox.take([step(engine_id, made, ends=what == "end")])
            made += 1
        elif what == "wait":
            clock.now += HOLD_S
        else:
            batch = outbox.batch()
            if what != "lost before":
                verdicts = log.publish(batch)
                if what == "answered":
                    outbox.settle(batch, verdicts)
    assert log.tokens == list(range(made))
    assert "".join(chunk.text for chunk in log.chunks) == "".join(f"<{n}>" for n in range(made))
    assert log.chunks[-1].finish is not None
    assert len(outbox) == 0
