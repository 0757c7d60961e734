"""How fast an answer comes, as its reader sees it."""

from __future__ import annotations

import time


class Pace:
    """Counts from its creation. The rate leaves out the first token, whose wait is the time to first token.

    Who resumes reads at once what was made before: that is no pace, neither of the first token nor of the others.
    """

    def __init__(self, *, is_resumed: bool = False) -> None:
        self._began_at = time.perf_counter()
        self._is_resumed = is_resumed
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._after_first = 0

    def saw(self, tokens: int) -> None:
        if not tokens:
            return
        self._last_at = time.perf_counter()
        if self._first_at is None:
            self._first_at = self._last_at
        else:
            self._after_first += tokens

    @property
    def ttft_ms(self) -> int | None:
        if self._first_at is None or self._is_resumed:
            return None
        return round((self._first_at - self._began_at) * 1000)

    @property
    def tokens_per_second(self) -> float | None:
        if self._is_resumed or self._first_at is None or self._last_at is None or not self._after_first:
            return None
        elapsed = self._last_at - self._first_at
        return round(self._after_first / elapsed, 1) if elapsed > 0 else None
