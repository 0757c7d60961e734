"""Who computes how many tokens in the next step. Pure policy: no tensors, no clock, no I/O.

One token budget per step, no phases (the idea of vLLM's V1 scheduler): sequences that need one
token, the decodes, come first, so that no prompt stalls a stream; chunks of prompts fill the rest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.sequence import Sequence, Status

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` of `sequence`, from its `num_computed` on, are to be computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last known token is among them, so that the next one can be chosen."""
        return self.num_tokens == self.sequence.num_uncomputed


class Scheduler:
    """Orders waiting and running sequences and shares out slots, blocks and the token budget."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        # Both sorted by `Sequence.order`, best first.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state, and frees its blocks. Idempotent."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._pool.release(sequence.table)

    def schedule(self) -> list[Scheduled]:
        """The next step: decodes first, then prompt chunks, each in order of priority."""
        self._admit()
        budget = self._max_num_batched_tokens
        plan: list[Scheduled] = []
        for sequence in self._decodes():
            plan.append(Scheduled(sequence, 1))
            budget -= 1
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.num_uncomputed > 1:
                chunk = min(budget, sequence.num_uncomputed)
                plan.append(Scheduled(sequence, chunk))
                budget -= chunk
        return plan

    def _decodes(self) -> Iterator[Sequence]:
        """Running sequences that need one token and have, or get, the block for it."""
        for sequence in list(self.running):
            if sequence.status is Status.RUNNING and sequence.num_uncomputed == 1 and self._grow(sequence):
                yield sequence

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for the sequence's tokens, at the cost of the last in order, which may be itself."""
        while not self._pool.grow(sequence.table, len(sequence.token_ids)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self) -> None:
        """Moves the best waiting sequences to running while slots, blocks and the budget last."""
        demand = sum(sequence.num_uncomputed for sequence in self.running)
        while self.waiting and demand < self._max_num_batched_tokens:
            head = self.waiting[0]
            while not self._fits(head):
                if not self._can_displace(head):
                    return
                demand -= self.running[-1].num_uncomputed
                self._preempt(self.running[-1])
            self.waiting.remove(head)
            self._pool.grow(head.table, len(head.token_ids))
            head.status = Status.RUNNING
            insort(self.running, head, key=_ORDER)
            demand += head.num_uncomputed

    def _fits(self, head: Sequence) -> bool:
        if not self.running:
            return self._pool.missing(head.table, len(head.token_ids)) <= self._pool.free
        # Each running sequence may soon need one more block: admitting into the last of them would
        # only have the newcomer, or another, preempted a moment later.
        missing = self._pool.missing(head.table, len(head.token_ids)) + len(self.running)
        return len(self.running) < self._max_num_seqs and missing <= self._pool.free

    def _can_displace(self, head: Sequence) -> bool:
        """Whether preempting sequences of strictly lower classes would let `head` run."""
        lower = [sequence for sequence in self.running if sequence.rank > head.rank]
        if not lower:
            return False
        staying = len(self.running) - len(lower)
        gained = sum(len(sequence.table.blocks) for sequence in lower)
        missing = self._pool.missing(head.table, len(head.token_ids)) + staying
        return missing <= self._pool.free + gained

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting, to be recomputed from its tokens: it loses its blocks, nothing else."""
        self.running.remove(sequence)
        self._pool.release(sequence.table)
        sequence.num_computed = 0
        sequence.preempted = True
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_ORDER)
        self.preemptions += 1
