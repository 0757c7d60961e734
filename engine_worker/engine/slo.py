"""Holds the time between tokens to a target, by what a step may compute. Pure policy: the clock is passed in.

Two hands on one valve. AIMD (Chiu and Jain, 1989) on the token budget and the number of sequences, from the
90th percentile of lateness, finds what the machine bears. A forecast of the next step caps the prompt
tokens beside running streams at once, so that the first long prompt does not have to break the target
before anything is learned.

Past both floors the ladder goes on; its last rungs are for whoever sends the requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine_worker.protocol import Rung

_DECREASE_TOKENS: Final = 0.7
_DECREASE_SEQS: Final = 0.8
_INCREASE_STEPS: Final = 16
"""From floor to ceiling in about so many quiet decisions."""
_CALM: Final = 0.8
"""Of the target: below it there is room; between it and 1 nothing changes."""
_FORECAST: Final = 0.85
"""Of the target, for what the forecast does not see: a prompt's tokens cost more the further it gets."""
_SMOOTHING: Final = 0.3
_MIN_SAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a step may compute."""

    tokens: int
    """Per step, decodes included."""
    seqs: int
    """At once."""


class LatencyController:
    """`ceiling`: as configured. `floor`: never less. `interval_s`: between decisions."""

    def __init__(self, ceiling: Allowance, floor: Allowance, *, interval_s: float = 1.0) -> None:
        self._ceiling = ceiling
        self._floor = Allowance(min(floor.tokens, ceiling.tokens), min(floor.seqs, ceiling.seqs))
        self._interval_s = interval_s
        self._tokens, self._seqs = ceiling.tokens, ceiling.seqs
        self._beyond = Rung.NONE
        self._lateness: list[float] = []
        self._decided_at: float | None = None
        self._decode_s: float | None = None
        self._prompt_token_s: float | None = None

    @property
    def rung(self) -> Rung:
        if self._beyond:
            return self._beyond
        if self._seqs < self._ceiling.seqs:
            return Rung.FEWER_SEQUENCES
        return Rung.SMALLER_CHUNKS if self._tokens < self._ceiling.tokens else Rung.NONE

    def note_gaps(self, lateness: Iterable[float]) -> None:
        """Times between two tokens of a stream, each over its target: 1 is just in time."""
        self._lateness += lateness

    def note_step(self, duration_s: float, *, decodes: int, prompt_tokens: int) -> None:
        """What a step took: the forecast's only source."""
        if prompt_tokens == 0:
            self._decode_s = _smoothed(self._decode_s, duration_s)
        else:
            beside = self._decode_s or 0.0 if decodes else 0.0
            rate = max(0.0, duration_s - beside) / prompt_tokens
            self._prompt_token_s = _smoothed(self._prompt_token_s, rate)

    def allowance(self, now: float, *, streams: int, target_s: float | None) -> Allowance:
        """For the next step. `streams`: those that wait for a token; `target_s`: the tightest of theirs, and of
        those that may come while it runs."""
        self._decide(now)
        tokens = self._tokens
        if target_s is not None and self._prompt_token_s:
            left_s = _FORECAST * target_s - (self._decode_s or 0.0 if streams else 0.0)
            tokens = min(tokens, streams + int(left_s / self._prompt_token_s))
        # Beside any number of streams prompts get on by as much as the floor.
        return Allowance(max(tokens, min(self._ceiling.tokens, self._floor.tokens + streams)), self._seqs)

    def _decide(self, now: float) -> None:
        if self._decided_at is None:
            self._decided_at = now
        if now - self._decided_at < self._interval_s:
            return
        self._decided_at = now
        if len(self._lateness) < _MIN_SAMPLES:
            if not self._lateness:
                self._relax()  # nobody is waiting for tokens
            return
        p90 = sorted(self._lateness)[int(len(self._lateness) * 0.9)]
        self._lateness.clear()
        if p90 > 1:
            self._tighten()
        elif p90 < _CALM:
            self._relax()

    def _tighten(self) -> None:
        if self._tokens > self._floor.tokens:
            self._tokens = max(self._floor.tokens, int(self._tokens * _DECREASE_TOKENS))
        elif self._seqs > self._floor.seqs:
            self._seqs = max(self._floor.seqs, int(self._seqs * _DECREASE_SEQS))
        else:
            self._beyond = Rung(min(Rung.REFUSING, max(Rung.NO_SPECULATION, self._beyond + 1)))

    def _relax(self) -> None:
        """In the reverse order, one thing at a time."""
        if self._beyond:
            down = self._beyond - 1
            self._beyond = Rung(down) if down >= Rung.NO_SPECULATION else Rung.NONE
        elif self._seqs < self._ceiling.seqs:
            self._seqs = min(self._ceiling.seqs, self._seqs + 1 + self._ceiling.seqs // _INCREASE_STEPS)
        else:
            step = 1 + self._ceiling.tokens // _INCREASE_STEPS
            self._tokens = min(self._ceiling.tokens, self._tokens + step)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
