"""The latency controller, on a fake clock: alone, and with the real scheduler on a simulated machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.config import EngineConfig
from engine_worker.engine.errors import EngineDead
from engine_worker.engine.meter import Meter
from engine_worker.engine.pace import Pace
from engine_worker.engine.slo import Allowance, LatencyController
from engine_worker.protocol import Rung
from tests.engine_worker.driving import Driver, request
from tests.engine_worker.engine.test_scheduler import compute, make, sequence, shares

CEILING, FLOOR = Allowance(512, 64), Allowance(16, 1)


def controller() -> LatencyController:
    subject = LatencyController(CEILING, FLOOR)
    subject.allowance(0, streams=0, target_s=None)  # from here on it counts the time
    return subject


def decide(subject: LatencyController, lateness: float, times: int = 1, *, start: float = 0.0) -> Allowance:
    """`times` decisions, a second apart, each on so many equal gaps. The last one's outcome."""
    for i in range(times):
        subject.note_gaps([lateness] * 30)
        allowance = subject.allowance(start + i + 1, streams=0, target_s=None)
    return allowance


def rungs(subject: LatencyController, lateness: float, *, start: float) -> list[Rung]:
    """Those passed in a hundred decisions, in order."""
    seen = [subject.rung]
    for second in range(100):
        decide(subject, lateness, start=start + second * 1.5)
        if seen[-1] != subject.rung:
            seen.append(subject.rung)
    return seen


def test_lateness_shrinks_chunks_then_sequences_then_asks_for_relief():
    subject = controller()
    assert rungs(subject, 1.5, start=0.0) == list(Rung)
    assert decide(subject, 1.5, start=900.0) == FLOOR


def test_calm_takes_everything_back_in_the_reverse_order():
    subject = controller()
    decide(subject, 2.0, 60)
    assert rungs(subject, 0.3, start=100.0) == list(Rung)[::-1]
    assert decide(subject, 0.3, start=900.0) == CEILING


def test_from_the_third_rung_on_nothing_is_guessed_ahead():
    subject, (scheduler, _), second, seen = controller(), make(), 0.0, set()
    pace = Pace(subject, {0: 0.1}, lambda: second + 1)
    for lateness in (1.5, 0.3):
        for _ in range(100):
            second += 1.5
            decide(subject, lateness, start=second)
            pace.before(scheduler)
            assert scheduler.may_speculate == (subject.rung < Rung.NO_SPECULATION)
            seen.add(subject.rung)
    assert seen == set(Rung)


def test_between_calm_and_late_nothing_changes():
    subject = controller()
    before = decide(subject, 1.2, 3)
    assert decide(subject, 0.9, 50, start=10.0) == before


def test_a_few_slow_gaps_in_many_are_no_reason():
    subject = controller()
    subject.note_gaps([0.9] * 95 + [50.0] * 5)
    assert subject.allowance(2, streams=0, target_s=None) == CEILING


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 64), st.floats(0.001, 2)), max_size=60))
def test_always_between_floor_and_ceiling(steps):
    subject = controller()
    now = 0.0
    for lateness, streams, duration in steps:
        now += duration
        subject.note_gaps([lateness] * 25)
        subject.note_step(duration, decodes=streams, prompt_tokens=100)
        allowance = subject.allowance(now, streams=streams, target_s=0.1)
        assert min(FLOOR.tokens + streams, CEILING.tokens) <= allowance.tokens <= CEILING.tokens
        assert FLOOR.seqs <= allowance.seqs <= CEILING.seqs


class Machine:
    """The real scheduler on a clock that a made-up machine moves: so long per step, decode and prompt token."""

    step_s, decode_s, prompt_token_s = 0.02, 0.002, 0.001

    def __init__(self, *, paced: bool, target_s: float) -> None:
        self.now = 0.0
        self.scheduler, _ = make(3000, seqs=64, budget=512)
        self.pace = Pace(LatencyController(CEILING, FLOOR), {0: target_s} if paced else {}, lambda: self.now)
        self.meter = Meter(clock=lambda: self.now)
        self.gaps: list[tuple[int, float]] = []
        self.longest_s = 0.0

    def step(self) -> None:
        began = self.now
        self.pace.before(self.scheduler)
        plan = self.scheduler.schedule()
        chunks = [n for n in shares(plan).values() if n > 1]
        decodes = len(plan) - len(chunks)
        took = self.step_s + decodes * self.decode_s + sum(chunks) * self.prompt_token_s
        self.now += took
        compute(self.scheduler, plan)
        waits = self.meter.book(plan, 0.0)
        self.pace.after(plan, waits, took)
        self.gaps += [(sequence.uid, wait) for sequence, wait in waits]
        for item in plan:
            item.sequence.take_output()
        self.longest_s = max(self.longest_s, self.now - began)


def first_token_beside_lower_classes(*, paced: bool) -> tuple[float, float]:
    """Of the best class, when it comes in the middle of a step; and the longest step before it came."""
    machine = Machine(paced=paced, target_s=0.1)
    for uid in range(1, 9):
        machine.scheduler.add(sequence(uid, 40, max_tokens=400, priority=(2, float(uid))))
    for _ in range(20):
        machine.step()
    machine.scheduler.add(sequence(98, 8000, max_tokens=4, priority=(2, 98.0)))
    machine.longest_s = 0.0
    for _ in range(5):
        machine.step()
    machine.scheduler.add(sequence(99, 40, max_tokens=4, priority=(0, 0.0)))
    before, came = machine.longest_s, machine.now
    machine.step()
    assert machine.scheduler.running[0].num_output == 1
    return machine.now - came, before


def test_who_may_come_waits_for_no_longer_step_than_its_target():
    first_token_s, longest_s = first_token_beside_lower_classes(paced=True)
    assert longest_s <= 0.1
    assert first_token_s == pytest.approx(Machine.step_s + 40 * Machine.prompt_token_s)  # as if alone
    # The control: without a target a better class still goes first, but waits for a step of any length.
    first_token_s, longest_s = first_token_beside_lower_classes(paced=False)
    assert longest_s > 0.5
    assert first_token_s == pytest.approx(Machine.step_s + 40 * Machine.prompt_token_s)


def worst_gap_while_a_long_prompt_arrives(*, paced: bool) -> float:
    machine = Machine(paced=paced, target_s=0.1)
    for uid in range(1, 9):
        machine.scheduler.add(sequence(uid, 40, max_tokens=400))
    for _ in range(20):
        machine.step()
    machine.gaps.clear()
    long = sequence(99, 4000, max_tokens=4)
    machine.scheduler.add(long)
    for _ in range(350):
        machine.step()
    assert long.finish is not None, "the prompt never got on"
    return max(gap for uid, gap in machine.gaps if uid != 99)


def test_fault_19_a_long_prompt_keeps_every_gap_under_the_target():
    assert worst_gap_while_a_long_prompt_arrives(paced=True) <= 0.1
    # The control: without a target the chunk is as large as it may be.
    assert worst_gap_while_a_long_prompt_arrives(paced=False) > 0.5


def test_too_many_streams_for_the_target_are_fewer_in_the_end():
    machine = Machine(paced=True, target_s=0.06)  # 20 streams and nothing else are the most that fit
    uid = 0
    for _ in range(4000):
        while len(machine.scheduler.running) + len(machine.scheduler.waiting) < 64:
            uid += 1
            machine.scheduler.add(sequence(uid, 4, max_tokens=40))
        machine.step()
    settled = sorted(gap for _, gap in machine.gaps[-20_000:])
    assert settled[len(settled) // 2] <= 0.06
    assert settled[int(len(settled) * 0.9)] <= 0.075
    assert len(machine.scheduler.running) >= 10, "throughput was given away"


def test_targets_are_read_and_refused_by_name(tmp_path):
    config = EngineConfig(model_dir=tmp_path, itl_targets_ms="0:100,2:250.5")
    assert config.itl_targets_s() == {0: 0.1, 2: 0.2505}
    for bad in ("fast", "0:", "0:0", "x:5"):
        with pytest.raises(ValueError, match="itl_targets_ms"):
            EngineConfig(model_dir=tmp_path, itl_targets_ms=bad)


def test_the_engine_keeps_its_tokens_whatever_the_target(build_tiny):
    requests = [request(str(i), [i + 1] * 30, 12) for i in range(6)]
    plain = Driver(build_tiny()).run(requests)
    # A target that no machine can keep: everything at its floor.
    paced = Driver(build_tiny(itl_targets_ms="0:0.001")).run(requests)
    assert {key: value.token_ids for key, value in paced.items()} == {
        key: value.token_ids for key, value in plain.items()
    }


def test_fault_31_a_device_that_failed_ends_the_engine_and_blames_no_request(build_tiny):
    driver = Driver(build_tiny())
    driver.add(request("a", [1, 2, 3]))

    def fails(step):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    driver.core.device.executor.runner.execute = fails
    with pytest.raises(EngineDead, match="illegal memory access"):
        driver.step()
    assert driver.results["a"].finish is None
