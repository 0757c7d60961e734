"""What the sampler must know of whoever a token is chosen for: a sequence, or a sequence some tokens ahead."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from engine_worker.engine.grammar import Matcher
from engine_worker.protocol import SamplingParams


class Row(Protocol):
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def token_ids(self) -> list[int]:
        """Prompt, then output."""

    @property
    def num_prompt(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def matcher(self) -> Matcher | None: ...


class Ahead:
    """`row` as it will be if `more` follows the first `known` of its tokens."""

    matcher = None
    """A sequence with a grammar is never seen ahead of its tokens."""

    def __init__(self, row: Row, known: int, more: Rows[int]) -> None:
        self._row, self._known, self._more = row, known, more
        self.sampling, self.num_prompt = row.sampling, row.num_prompt
        self.stop_ids, self.bad_words = row.stop_ids, row.bad_words

    @property
    def token_ids(self) -> list[int]:
        return [*self._row.token_ids[: self._known], *self._more]

    @property
    def num_output(self) -> int:
        return self._known + len(self._more) - self.num_prompt
