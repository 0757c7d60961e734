"""Scheduling policy alone: no model, no clock."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.detokenizer import Detokenizer
from engine_worker.engine.output_text import OutputText
from engine_worker.engine.prefix import PrefixKeys, root_key
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.scheduler import Scheduler
from engine_worker.engine.sequence import Sequence, Status
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import request
from tests.engine_worker.models import byte_tokenizer

_TOKENIZER = byte_tokenizer()


def sequence(
    uid: int,
    prompt: int,
    max_tokens: int = 8,
    priority: tuple[int, float] = (0, 0.0),
    *,
    token: int = 1,
    salt: str | None = None,
) -> Sequence:
    """Without a salt it takes no part in the prefix cache."""
    return Sequence(
        uid=uid,
        request=request(str(uid), [token] * prompt, max_tokens, priority=priority, cache_salt=salt or ""),
        token_ids=[token] * prompt,
        num_prompt=prompt,
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        text=OutputText(Detokenizer(_TOKENIZER, frozenset())),
        prefix=None if salt is None else PrefixKeys(root_key(model_revision="r", salt=salt), 4),
    )


def make(num_blocks: int = 33, *, seqs: int = 4, budget: int = 16) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, 4)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget), pool


def compute(scheduler: Scheduler, plan: list[Scheduled]) -> None:
    """What the core does with a step, without a model."""
    for item in plan:
        item.sequence.pending = ()
        if item.samples:
            scheduler.keep(item.sequence, item.end)
            item.sequence.append(1)
            if item.sequence.finish is not None:
                scheduler.remove(item.sequence)


def shares(plan: list[Scheduled]) -> dict[int, int]:
    return {item.sequence.uid: item.num_tokens for item in plan}


def test_decodes_come_first_and_prompts_fill_the_rest():
    scheduler, _ = make()
    scheduler.add(sequence(1, 3))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(2, 40))
    scheduler.add(sequence(3, 5))
    plan = scheduler.schedule()
    assert shares(plan) == {1: 1, 2: 15}
    compute(scheduler, plan)
    assert shares(scheduler.schedule()) == {1: 1, 2: 15}


def test_fault_19_a_long_prompt_stalls_no_stream():
    scheduler, _ = make(seqs=4, budget=8)
    for uid in (1, 2, 3):
        scheduler.add(sequence(uid, 2, max_tokens=30))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(4, 60))
    for _ in range(12):
        plan = scheduler.schedule()
        assert {1, 2, 3} <= shares(plan).keys()
        assert sum(shares(plan).values()) <= 8
        compute(scheduler, plan)


def test_order_is_class_then_counter_then_arrival():
    scheduler, _ = make(seqs=1)
    low, high, cheap = sequence(1, 2, 1, (1, 0.0)), sequence(2, 2, 1, (0, 9.0)), sequence(3, 2, 1, (0, 5.0))
    for item in (low, high, cheap):
        scheduler.add(item)
    order = []
    while plan := scheduler.schedule():
        order += shares(plan)
        compute(scheduler, plan)
    assert order == [3, 2, 1]


def test_fault_06_a_preempted_sequence_keeps_its_place():
    # 8 blocks of 4: two sequences of 12 tokens fit until both want a fourth block and then a fifth.
    scheduler, _ = make(9, seqs=4, budget=64)
    first, second = sequence(1, 12, 20), sequence(2, 12, 20)
    scheduler.add(first)
    scheduler.add(second)
    while not second.preempted:
        compute(scheduler, scheduler.schedule())
    for uid in (3, 4):
        scheduler.add(sequence(uid, 4, 4, (0, -1.0)))
    assert [item.uid for item in scheduler.waiting] == [2, 3, 4]
    # But never before a better class.
    scheduler.add(sequence(5, 4, 4, (-1, 0.0)))
    assert [item.uid for item in scheduler.waiting] == [5, 2, 3, 4]


def test_fault_07_a_lower_class_gives_up_its_slot():
    scheduler, _ = make(seqs=1)
    low, high = sequence(1, 4, 100, (2, 0.0)), sequence(2, 4, 2, (0, 0.0))
    scheduler.add(low)
    compute(scheduler, scheduler.schedule())
    scheduler.add(high)
    assert shares(scheduler.schedule()) == {2: 4}
    assert low.preempted
    assert low.status is Status.WAITING


def test_the_same_class_does_not_displace():
    scheduler, _ = make(seqs=1)
    scheduler.add(sequence(1, 4, 100, (1, 5.0)))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(2, 4, 2, (1, 0.0)))
    assert shares(scheduler.schedule()) == {1: 1}


def test_a_better_class_is_admitted_whatever_prompts_lower_ones_have_left():
    scheduler, _ = make(seqs=4, budget=16)
    scheduler.add(sequence(1, 60, 8, (2, 0.0)))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(2, 20, 8, (0, 0.0)))
    assert shares(scheduler.schedule()) == {2: 16}


def test_beside_a_prompt_lower_classes_sit_out_every_second_step():
    scheduler, _ = make(100, seqs=8, budget=16)
    scheduler.add(sequence(1, 4, 100, (2, 0.0)))
    scheduler.add(sequence(2, 4, 100, (0, 0.0)))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(3, 60, 8, (2, 0.0)))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(4, 40, 8, (0, 1.0)))
    steps = []
    for _ in range(4):
        plan = scheduler.schedule()
        steps.append(shares(plan))
        compute(scheduler, plan)
    # The stream of its own class is in each of them, and in the last all is as if there had been no prompt.
    assert steps == [{2: 1, 4: 15}, {2: 1, 1: 1, 4: 14}, {2: 1, 4: 11}, {2: 1, 4: 1, 1: 1, 3: 13}]


def test_nobody_is_displaced_in_vain():
    # The better request would not fit even if the lower class left: it stays.
    scheduler, _ = make(9, seqs=4, budget=64)
    scheduler.add(sequence(1, 16, 8, (0, 0.0)))
    scheduler.add(sequence(2, 4, 8, (2, 0.0)))
    compute(scheduler, scheduler.schedule())
    scheduler.add(sequence(3, 24, 4, (0, 1.0)))
    assert set(shares(scheduler.schedule())) == {1, 2}


def test_remove_is_idempotent_in_each_state():
    scheduler, pool = make()
    waiting, running = sequence(1, 4), sequence(2, 4)
    scheduler.add(running)
    scheduler.schedule()
    scheduler.add(waiting)
    for item in (waiting, running, waiting, running):
        scheduler.remove(item)
    assert (scheduler.waiting, scheduler.running, pool.used) == ([], [], 0)


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 30),
            st.integers(1, 20),
            st.integers(0, 2),
            st.integers(1, 2),
            st.sampled_from([None, "A", "B"]),
        ),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("abort in flight"), st.integers(0, 20)),
    ),
    max_size=80,
)


@given(_ACTIONS, st.integers(14, 40), st.integers(1, 5), st.integers(5, 40))
@settings(max_examples=int(os.environ.get("WEIR_HISTORIES", "400")), deadline=None)
def test_fault_24_38_any_history_keeps_the_books_and_ends(actions, num_blocks, seqs, budget):
    """Random arrivals, steps, aborts (also between schedule and update) and the preemptions that follow."""
    scheduler, pool = make(num_blocks, seqs=seqs, budget=budget)
    everything: list[Sequence] = []
    memory: dict[tuple[int, int], object] = {}

    def content(item: Sequence, at: int) -> object:
        return (item.request.cache_salt, tuple(item.token_ids[: at + 1]))

    def cells(item: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        return [(item.table.blocks[at // 4], at % 4) for at in range(start, end)]

    def step(abort: int | None = None) -> bool:
        plan = scheduler.schedule()
        assert sum(item.num_tokens for item in plan) <= budget
        assert len({item.sequence.uid for item in plan}) == len(plan)
        for item in plan:
            mine, start = item.sequence, item.start
            for at, cell in enumerate(cells(mine, start, start + item.num_tokens), start):
                memory[cell] = content(mine, at)
        # Nothing that anybody relies on has been overwritten, or is another's.
        for item in scheduler.running:
            for at, cell in enumerate(cells(item, 0, item.num_computed)):
                assert memory[cell] == content(item, at)
        for item in plan:
            assert item.num_tokens > 0
            assert item.end == item.sequence.num_computed <= item.sequence.num_tokens
            assert len(item.sequence.table.blocks) * 4 >= item.end
        if abort is not None and everything:
            scheduler.remove(everything[abort % len(everything)])
        compute(scheduler, [item for item in plan if item.sequence.status is Status.RUNNING])
        return bool(plan)

    for name, *values in actions:
        if name == "add":
            prompt, max_tokens, rank, token, salt = values
            item = sequence(len(everything) + 1, prompt, max_tokens, (rank, 0.0), token=token, salt=salt)
            everything.append(item)
            scheduler.add(item)
        elif name == "step":
            step()
        elif name == "abort" and everything:
            scheduler.remove(everything[values[0] % len(everything)])
        elif name == "abort in flight":
            step(values[0])
        assert len(scheduler.running) <= seqs
        assert scheduler.running == sorted(scheduler.running, key=lambda item: item.order)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda item: item.order)
        pool.check([item.table for item in everything])
    # Whatever happened, everything that was not aborted comes to its end.
    for _ in range(5000):
        if not step():
            break
    assert not scheduler.running
    assert not scheduler.waiting
    assert pool.available == pool.total
    for item in everything:
        assert item.status is Status.FINISHED
        assert item.finish is None or item.finish.reason == FinishReason.LENGTH
