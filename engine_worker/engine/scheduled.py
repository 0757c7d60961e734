"""What the scheduler decided for one sequence in one step."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from engine_worker.engine.sequence import Choice, Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` of `sequence`, from position `start` on, are to be computed in this step.

    It says all that computing them takes: whoever does that looks at nothing that scheduling changes.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    known: int
    """Tokens of the sequence that were known; they never change."""
    blocks: Rows[int]
    awaits: Choice | None = None
    """The token that follows the known ones, chosen by the step before this one; None: nothing is in flight."""
    chooses: Choice | None = None
    """Where the token goes that follows; None: the last token is not among those to compute."""
    draft: tuple[int, ...] = ()
    """The last of the tokens to compute: not the sequence's yet, only guessed."""
    num_logits: int = 0
    """So many of the last tokens are asked what comes next: one to sample, all to score a prompt."""

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int, draft: tuple[int, ...] = ()) -> Scheduled:
        start = sequence.num_computed
        samples = num_tokens - len(draft) == sequence.num_uncomputed
        num_logits = 1 + len(draft) if samples else 0
        if sequence.scored is not None and sequence.is_scoring:
            num_logits = max(0, start + num_tokens - len(sequence.scored))
        return cls(
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            known=len(sequence.token_ids),
            blocks=sequence.table.blocks,
            awaits=sequence.pending[-1] if sequence.pending else None,
            chooses=Choice() if samples else None,
            draft=draft,
            num_logits=num_logits,
        )

    @property
    def end(self) -> int:
        """The position after its last token that is not a guess."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def samples(self) -> bool:
        return self.chooses is not None

    @property
    def token_ids(self) -> list[int]:
        """Those to compute; the step before must have chosen what is awaited."""
        known = self.sequence.token_ids[self.start : min(self.end, self.known)]
        return [*known, *self.awaited, *self.draft]

    @property
    def awaited(self) -> tuple[int, ...]:
        if self.awaits is None:
            return ()
        assert self.awaits.token_id is not None, "the step before has not chosen yet"
        return (self.awaits.token_id,)
