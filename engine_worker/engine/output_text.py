"""The text of one output, on its way to the client: stop strings are looked for, and never let out."""

from __future__ import annotations

from collections.abc import Sequence

from engine_worker.engine.detokenizer import Detokenizer


class OutputText:
    """Text of the tokens so far, of which `take` hands out each character once.

    Held back is only a suffix that the next tokens could turn into a stop string; what was handed
    out is always a prefix of the final text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._ready = ""  # decoded and not yet handed out
        self._closed = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Adds a token. Returns the stop string that it completed, if any: the text then ends before it.

        With `may_stop` false (min_tokens) a stop string that this token completes is ordinary text.
        """
        return self._add(self._detokenizer.push((token_id,)), may_stop)

    def close(self) -> None:
        """No token will follow: nothing is held back any more. Idempotent."""
        if not self._closed:
            self._ready += self._detokenizer.flush()
        self._closed = True

    def take(self) -> str:
        """What can be handed out now and was not before."""
        held = 0 if self._closed else self._held()
        text = self._ready[: len(self._ready) - held]
        self._ready = self._ready[len(text) :]
        return text

    def _add(self, new: str, may_stop: bool) -> str | None:
        before = len(self._ready)
        self._ready += new
        if not (new and self._stop and may_stop):
            return None
        # A match that ends in older text was passed over on purpose, so it must end in the new text.
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self._ready.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        self._ready = self._ready[:at]
        self._closed = True
        return stop

    def _held(self) -> int:
        """Length of the longest suffix that is the beginning, but not the whole, of a stop string."""
        for length in range(min(self._longest - 1, len(self._ready)), 0, -1):
            suffix = self._ready[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
