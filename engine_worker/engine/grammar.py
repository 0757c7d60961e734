"""Output that must follow a grammar: which tokens may come next, by llguidance (docs/adr names why).

A grammar is text in llguidance's own serialisation; the gateway makes it of a JSON schema, a regular
expression or a Lark or GBNF grammar. A matcher follows one sequence's output token by token, so a
preempted sequence keeps its own and a resumed one gets there by replay.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

if TYPE_CHECKING:
    from engine_worker.engine.row import Row


log = structlog.get_logger(__name__)

_TOO_COMPLEX = ("parser error:", "lexer error:")
"""How llguidance begins to say that a limit of its own was met; its stop reason tells no such error apart."""

_LIMITS: Final = LLParserLimits(initial_lexer_fuel=200_000)
"""A fifth of llguidance's own: what does not fit is found out in some 60 ms, and not in 600. A choice between 3,000
strings fits."""
_SLOW_S: Final = 0.005
"""Of the processor's time for one mask, which all of a batch wait for. Schemas of hundreds of fields take a tenth."""
_LOOKED_AT: Final = 8
"""The last masks, most of which have to be slow: a single one may be."""
_ADVICE: Final = "Make it simpler: fewer repetitions within repetitions, and lower counts."


class GrammarError(Exception):
    """The grammar can't be used, or the output has left it; the message says why."""


class GrammarTooComplexError(GrammarError):
    """Following it takes more than llguidance allows: the grammar is to blame, and whoever wrote it."""


class Grammars:
    """Makes matchers for one tokenizer. Takes up to a second, for a table of its tokens: at the start, when no stream
    waits for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        try:
            self._table = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as error:  # such a model is served all the same
            log.warning("grammar.tokenizer_not_known", reason=str(error))

    def matcher(self, grammar: str) -> Matcher:
        """Raises GrammarError when the grammar is not valid or too large."""
        if self._table is None:
            raise GrammarError("no grammar can be followed with this model's tokenizer: ask another model")
        return Matcher(LLMatcher(self._table, grammar, log_level=0, limits=_LIMITS), self._vocab_size)


class Matcher:
    """Where in its grammar one sequence is. The first mask, which takes the longest by far, is made at once, so that
    no step of others waits for it. `clock`: seconds of this thread's processor time."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._matcher, self._clock = matcher, clock
        self._mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._vocab_size = vocab_size
        self._took: deque[float] = deque(maxlen=_LOOKED_AT)
        self._check()
        self._compute_mask()
        self._check()
        self._took.clear()

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def accept(self, token_id: int) -> None:
        """Raises GrammarError when the token does not follow, or following the grammar takes too much."""
        self._matcher.consume_token(token_id)
        self._check()
        if len(self._took) == _LOOKED_AT and statistics.median_low(self._took) > _SLOW_S:
            spent_ms = 1000 * statistics.median_low(self._took)
            raise GrammarTooComplexError(
                f"it takes {spent_ms:.0f} ms to say what may come next, of {1000 * _SLOW_S:.0f} that it may. {_ADVICE}"
            )

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool[vocab]. After an error all is forbidden, so the sequence can't seem to end well."""
        self._compute_mask()
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _compute_mask(self) -> None:
        began = self._clock()
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._took.append(self._clock() - began)

    def _check(self) -> None:
        if self._matcher.is_error():
            # What follows the first line is a dump of the parser.
            words = self._matcher.get_error().partition("\n<state>")[0][:500]
            if words.startswith(_TOO_COMPLEX):
                raise GrammarTooComplexError(f"{words.rstrip('.')}. {_ADVICE}")
            raise GrammarError(words)


def apply(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """`logits`: float32[rows, vocab]. Returned as they are where no row has a grammar, else a masked copy."""
    constrained = [i for i, row in enumerate(rows) if row.matcher is not None]
    if not constrained:
        return logits
    allowed = np.stack([matcher.allowed() for row in rows if (matcher := row.matcher) is not None])
    index = torch.tensor(constrained, device=logits.device)
    mask = torch.from_numpy(allowed).to(logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill(~mask, -torch.inf))
