"""Who computes how many tokens in the next step. Pure policy: no tensors, no clock, no I/O.

One token budget per step, no phases (the idea of vLLM's V1 scheduler): sequences that need one
token, the decodes, come first, so that no prompt stalls a stream; chunks of prompts fill the rest.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from operator import attrgetter

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.sequence import Sequence, Status
from engine_worker.engine.slo import Allowance
from engine_worker.engine.speculation import Drafter, draft_limit
from engine_worker.engine.swap import HostBlocks, Move

_ORDER = attrgetter("order")


class Scheduler:
    """Orders waiting and running sequences and shares out slots, blocks and the token budget."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculative_tokens: int = 0,
        speculative_rows: int = 16,
        host: HostBlocks | None = None,
    ) -> None:
        self._pool = pool
        self._ceiling = Allowance(max_num_batched_tokens, max_num_seqs)
        self._allowed = self._ceiling
        self._speculative_tokens = speculative_tokens
        self._speculative_rows = speculative_rows
        self._host = host
        self._moves: list[Move] = []
        self.may_speculate = True
        self._are_held = False
        # Both sorted by `Sequence.order`, best first.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.swapped_blocks = 0
        """Copied to host memory since start."""
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0

    def allow(self, allowance: Allowance) -> None:
        """From the next step on, and never more than the engine was built for. What runs goes on running."""
        self._allowed = Allowance(
            min(allowance.tokens, self._ceiling.tokens), min(allowance.seqs, self._ceiling.seqs)
        )

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
        self._leave_host(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step: decodes first, then prompt chunks, each in order of priority.

        What is in it counts as computed from here on, so that the step after it can be scheduled while it runs.
        """
        self._admit()
        budget = self._allowed.tokens
        plan: list[Scheduled] = []
        lowest = self._lowest_rank()
        decodes = list(self._decodes(lowest))
        limit = self._draft_limit(len(decodes))
        budget -= len(decodes)
        for sequence in decodes:
            draft = self._draft(sequence, min(limit, budget)) if limit else ()
            plan.append(self._begin(Scheduled.of(sequence, 1 + len(draft), draft)))
            budget -= len(draft)
        for sequence in self.running:
            if budget <= 0 or sequence.rank > lowest:
                break
            if sequence.num_uncomputed > 1:
                chunk = min(budget, sequence.num_uncomputed)
                plan.append(self._begin(Scheduled.of(sequence, chunk)))
                budget -= chunk
        return plan

    def _lowest_rank(self) -> float:
        """The last class that takes part in this step. Beside a prompt lower classes than its own sit out every
        second step: so its first token does not wait for theirs, and they don't stand still."""
        best = next((sequence.rank for sequence in self.running if sequence.num_uncomputed > 1), math.inf)
        self._are_held = not self._are_held and bool(self.running) and self.running[-1].rank > best
        return best if self._are_held else math.inf

    def _begin(self, item: Scheduled) -> Scheduled:
        item.sequence.num_computed = item.end
        if item.chooses is not None:
            item.sequence.pending += (item.chooses,)
        return item

    def note_step(self, plan: Rows[Scheduled], duration_s: float) -> None:
        """What a step took: where it was a prompt's, that is what computing one again would cost."""
        tokens = sum(item.num_tokens for item in plan)
        if self._host is not None and tokens >= 2 * self._pool.block_size and 2 * len(plan) <= tokens:
            self._host.note_prompt(duration_s, tokens)

    def take_moves(self) -> list[Move]:
        """Copies of blocks that `schedule` has decided on: to be made in this order, before its step is computed."""
        moves, self._moves = self._moves, []
        return moves

    def take_back(self, item: Scheduled) -> None:
        """Of the newest step, which was not computed: as if it had not been scheduled."""
        if item.sequence.status is Status.RUNNING:
            item.sequence.num_computed = item.start
            item.sequence.pending = () if item.awaits is None else (item.awaits,)

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step can't be scheduled before the one in flight has told its tokens."""
        return self._draft_limit(len(self.running)) > 0 or any(
            sequence.matcher is not None or sequence.is_scoring for sequence in self.running
        )

    def _decodes(self, lowest: float) -> Iterator[Sequence]:
        """Running sequences that need one token and have, or get, the block for it."""
        for sequence in list(self.running):
            if sequence.rank > lowest:
                return
            if sequence.status is not Status.RUNNING or sequence.num_uncomputed != 1 or sequence.will_end:
                continue
            if self._grow(sequence):
                yield sequence

    def _draft_limit(self, num_decodes: int) -> int:
        if not self._speculative_tokens or not self.may_speculate or not num_decodes:
            return 0
        return draft_limit(self._speculative_tokens, num_decodes, self._speculative_rows)

    def _draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Tokens that may come next, with blocks for them; never at another sequence's cost."""
        # One token is chosen after the draft.
        limit = min(limit, sequence.max_tokens - sequence.num_output - 1)
        if limit <= 0 or sequence.matcher is not None or sequence.pending:
            return ()
        if sequence.drafter is None:
            sequence.drafter = Drafter()
        draft = sequence.drafter.propose(sequence.token_ids, limit)
        return draft if self._pool.grow(sequence.table, len(sequence.token_ids) + len(draft)) else ()

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for the sequence's tokens, at the cost of the last in order, which may be itself."""
        while not self._pool.grow(sequence.table, sequence.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self) -> None:
        """Moves the best waiting sequences to running while slots, blocks and the budget last."""
        while self.waiting:
            head = self.waiting[0]
            if head.pending:
                return  # preempted with a token in flight: the next step will know it
            # Not that of lower classes: a better one's prompt is computed before theirs.
            demand = sum(s.num_uncomputed for s in self.running if s.rank <= head.rank)
            if demand >= self._allowed.tokens:
                return
            found = self._find(head)
            while not self._fits(head, found):
                if not self._can_displace(head, found):
                    return
                self._preempt(self.running[-1])
            self.waiting.remove(head)
            self._start(head, found)
            head.status = Status.RUNNING
            insort(self.running, head, key=_ORDER)

    def _find(self, head: Sequence) -> list[int]:
        """The cached blocks that `head` can begin with."""
        if head.prefix is None or head.is_scoring or head.host_blocks:
            return []
        # Never the last token: its logits are wanted, so it has to be computed.
        return self._pool.find(head.prefix.of(head.token_ids, len(head.token_ids) - 1))

    def _start(self, head: Sequence, found: list[int]) -> None:
        self._pool.share(head.table, found)
        self._pool.grow(head.table, len(head.token_ids))
        if head.host_blocks:
            blocks = head.table.blocks[: len(head.host_blocks)]
            self._moves.append(Move(to_host=False, device=blocks, host=head.host_blocks))
            self._leave_host(head)
            return
        head.num_computed = len(found) * self._pool.block_size
        if head.num_cached is None:
            head.num_cached = head.num_computed
            self.prompt_tokens += head.num_prompt
            self.cached_prompt_tokens += min(head.num_cached, head.num_prompt)

    def keep(self, sequence: Sequence, num_computed: int) -> None:
        """So many of the running sequence's tokens are computed and good: full blocks may serve others."""
        full = num_computed // self._pool.block_size
        if sequence.prefix is not None and full > sequence.table.num_known:
            self._pool.learn(sequence.table, sequence.prefix.of(sequence.token_ids, num_computed))

    def _fits(self, head: Sequence, found: list[int]) -> bool:
        cost = self._pool.cost(len(head.token_ids), found)
        if not self.running:
            return cost <= self._pool.available
        # Each running sequence may soon need one more block: admitting into the last of them would
        # only have the newcomer, or another, preempted a moment later.
        return len(self.running) < self._allowed.seqs and cost + len(self.running) <= self._pool.available

    def _can_displace(self, head: Sequence, found: list[int]) -> bool:
        """Whether preempting sequences of strictly lower classes would let `head` run."""
        lower = [sequence.table for sequence in self.running if sequence.rank > head.rank]
        if not lower:
            return False
        staying = len(self.running) - len(lower)
        freed = self._pool.freed_by(lower)
        cost = self._pool.cost(len(head.token_ids), found, freed)
        return cost + staying <= self._pool.available + len(freed)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting: it loses its blocks, nothing else. It comes back with copies of them, where host
        memory had room and that is cheaper; else what it then finds of them in the prefix cache is not recomputed."""
        self.running.remove(sequence)
        used = self._pool.blocks_for(sequence.num_computed)
        if self._host is not None and not sequence.is_scoring and (host := self._host.take(used)):
            self._moves.append(Move(to_host=True, device=sequence.table.blocks[:used], host=host))
            sequence.host_blocks = host
            self.swapped_blocks += used
        else:
            sequence.num_computed = 0
        self._pool.release(sequence.table)
        sequence.preempted = True
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_ORDER)
        self.preemptions += 1

    def lose(self, sequence: Sequence) -> None:
        """Of a sequence that waits: what was computed of it is not to be relied on."""
        sequence.pending = ()
        self._leave_host(sequence)
        sequence.num_computed = 0

    def _leave_host(self, sequence: Sequence) -> None:
        if self._host is not None:
            self._host.give_back(sequence.host_blocks)
        sequence.host_blocks = []
