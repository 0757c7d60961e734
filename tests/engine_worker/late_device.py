"""A device that computes as late as it may, and whose arithmetic anybody can check.

Its KV cache holds tokens. What it chooses is a function of the whole context as it reads it there, so a
block that was given away too soon, a position that was missed or a token that came twice changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from engine_worker.engine.executor import Result, StepAbandoned
from engine_worker.engine.sampler import Sampled
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.swap import Move

LETTERS = 3


def following(tokens: Rows[int]) -> int:
    """One of a few letters, so that stop strings and end tokens come up."""
    return ord("a") + zlib.crc32(bytes(tokens)) % LETTERS


def continuation(prompt: Rows[int], max_tokens: int, stop: Rows[int] = ()) -> list[int]:
    """What a request must give."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(following(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class _Late:
    device: LateDevice
    plan: Rows[Scheduled]
    moves: Rows[Move]
    outcome: list[Result] | Exception | None = None

    def result(self) -> list[Result]:
        while self.outcome is None:
            self.device.compute_next()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class LateDevice:
    block_size: int = 4
    fails: Callable[[Rows[Scheduled]], bool] = lambda plan: False
    cells: dict[int, int] = field(default_factory=dict)
    """Token by block * block_size + offset."""
    host_cells: dict[int, int] = field(default_factory=dict)
    waiting: list[_Late] = field(default_factory=list)
    most_in_flight: int = 0

    def launch(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> _Late:
        self.waiting.append(_Late(self, plan, moves))
        self.most_in_flight = max(self.most_in_flight, len(self.waiting))
        return self.waiting[-1]

    def scrub(self, blocks: Rows[int]) -> None: ...

    def close(self) -> None: ...

    def compute_next(self) -> None:
        step = self.waiting.pop(0)
        try:
            for move in step.moves:
                self._move(move)
            step.outcome = self._compute(step.plan)
        except Exception as error:
            step.outcome = error

    def _compute(self, plan: Rows[Scheduled]) -> list[Result]:
        if any(item.awaits is not None and item.awaits.token_id is None for item in plan):
            raise StepAbandoned
        if self.fails(plan):
            raise RuntimeError("the step failed")
        for item in plan:
            for at, token in enumerate(item.token_ids, item.start):
                self.cells[self._cell(item, at)] = token
        results = []
        for item in plan:
            sampled = []
            if item.chooses is not None:
                read = [self.cells[self._cell(item, at)] for at in range(item.end + len(item.draft))]
                ends = range(item.end, len(read) + 1)
                sampled = [Sampled(following(read[:end])) for end in ends]
                item.chooses.token_id = sampled[0].token_id
            results.append(Result(sampled))
        return results

    def _move(self, move: Move) -> None:
        there, here = (self.host_cells, self.cells) if move.to_host else (self.cells, self.host_cells)
        pairs = zip(move.device, move.host, strict=True)
        for device, host in pairs:
            source, target = (device, host) if move.to_host else (host, device)
            for offset in range(self.block_size):
                # What was never written holds nothing that anybody may read.
                there[target * self.block_size + offset] = here.get(source * self.block_size + offset, -1)

    def _cell(self, item: Scheduled, at: int) -> int:
        return item.blocks[at // self.block_size] * self.block_size + at % self.block_size
