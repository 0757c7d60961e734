"""Several tokens per step where the text repeats itself: prompt lookup, verified by exact sampling.

A draft is what followed the last occurrence of the newest three tokens (Saxena, "Prompt lookup decoding",
2023). The step computes it along with the last token; the sampler chooses at each of its positions as it
would have without it, and the draft counts as far as it agrees. Noise is a function of the position, so
the tokens are the same as without, sampled ones included.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Final

_NGRAM: Final = 3
_COST: Final = 0.3
"""Of a step of one token, that each further token in it costs at a few rows: what a draft must earn back."""
_CREDIT: Final = 3.0
_CREDIT_MAX: Final = 6.0
_PAUSE_TOKENS: Final = 48
"""Output tokens for which a sequence that earned too little is left alone."""


class Drafter:
    """Drafts for one sequence, and the account of whether they pay for themselves."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._followers: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._credit = _CREDIT
        self._paused_until = 0

    def propose(self, token_ids: Rows[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow `token_ids`, which only ever grows."""
        # All but the newest tokens: what is looked for must have something behind it.
        while self._indexed + _NGRAM < len(token_ids):
            at = self._indexed
            self._followers[tuple(token_ids[at : at + _NGRAM])] = at + _NGRAM
            self._indexed += 1
        if len(token_ids) < self._paused_until:
            return ()
        start = self._followers.get(tuple(token_ids[-_NGRAM:]))
        if start is None:
            return ()
        draft = list(token_ids[start : start + limit])
        period = len(token_ids) - start
        while len(draft) < limit:  # the repetition has begun already: it goes on with itself
            draft.append(draft[-period])
        return tuple(draft)

    def verified(self, drafted: int, accepted: int, num_tokens: int) -> None:
        """`accepted` of `drafted` tokens were right; the sequence has `num_tokens` now."""
        self.drafted += drafted
        self.accepted += accepted
        self._credit = min(_CREDIT_MAX, self._credit + accepted - _COST * drafted)
        if self._credit < 0:
            self._credit = _CREDIT / 2
            self._paused_until = num_tokens + _PAUSE_TOKENS


def draft_limit(speculative_tokens: int, num_decodes: int, max_rows: int) -> int:
    """Tokens per draft when `num_decodes` sequences share a step: with many, the step has no room to spare."""
    return max(0, min(speculative_tokens, max_rows // max(1, num_decodes) - 1))
