"""The next token of each row: masks, penalties and truncation, batched; a row that needs none pays nothing.

Order: penalties, logit bias, bad words, end tokens before min_tokens, grammar, temperature, top-k, top-p, min-p. Log
probabilities are those of the model, before all of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from engine_worker.engine import grammar, penalties
from engine_worker.engine.noise import uniform
from engine_worker.engine.row import Row
from engine_worker.engine.temperature import divisor
from engine_worker.protocol import PositionLogprobs, TokenLogprob

# Candidates to look for the nucleus among before sorting a whole vocabulary for it: a sort of 50,000
# takes longer than the rest of the sampler together.
_NUCLEUS_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int | None
    """None: there is no finite logit to choose from."""
    logprobs: PositionLogprobs | None = None
    is_forbidden: bool = False
    """There is none because the request forbids every token: the model's logits are in order."""


class Sampler:
    """Chooses tokens for a batch. Ids at or above `vocab_size` are padding and never chosen."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Rows[Row]) -> list[Sampled]:
        """One token per row. `logits`: float32[rows, at least vocab_size]; not changed.

        Noise is a function of (seed, output position) alone, so neither the batch nor a preemption
        nor a resumption on another worker changes what is drawn.
        """
        logits = logits[:, : self._vocab_size]
        shaped = grammar.apply(penalties.apply(logits, rows), rows)
        token_ids = shaped.argmax(dim=-1)
        # NaN counts as the largest: the chosen value tells such a row, and one where all is forbidden.
        usable = shaped.gather(1, token_ids[:, None])[:, 0].isfinite().tolist()
        random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
        if random:
            index = torch.tensor(random, device=logits.device)
            token_ids[index] = _draw(shaped[index], [rows[i] for i in random])
        chosen = token_ids.tolist()
        reported = self._logprobs(logits, rows, chosen)
        return [
            Sampled(token, reported.get(i)) if usable[i] else Sampled(None, is_forbidden=_is_sound(logits[i]))
            for i, token in enumerate(chosen)
        ]

    def score(self, logits: Tensor, token_ids: Rows[int], count: int) -> list[PositionLogprobs]:
        """How likely each of `token_ids` was, and `count` alternatives. `logits`: float32[tokens, vocab]."""
        logits = logits[:, : self._vocab_size]
        own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
        ranks = ((logits > own).sum(dim=-1) + 1).tolist()
        scores = _report(logits, token_ids, [count] * len(token_ids))
        return [msgspec.structs.replace(score, rank=rank) for score, rank in zip(scores, ranks, strict=True)]

    def _logprobs(self, logits: Tensor, rows: Rows[Row], chosen: list[int]) -> dict[int, PositionLogprobs]:
        wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not wanted:
            return {}
        counts = [rows[i].sampling.logprobs or 0 for i in wanted]
        return dict(zip(wanted, _report(logits[wanted], [chosen[i] for i in wanted], counts), strict=True))


def _is_sound(logits: Tensor) -> bool:
    """Whether the model gave something to choose from. `logits`: float32[vocab], before anything was forbidden."""
    return bool(logits.isfinite().any()) and not bool(logits.isnan().any())


def _report(logits: Tensor, chosen: Rows[int], counts: Rows[int]) -> list[PositionLogprobs]:
    """One entry per row of `logits`, float32[rows, vocab], with as many alternatives as `counts` says."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1))
    return [
        PositionLogprobs(
            TokenLogprob(token, own[row]),
            tuple(TokenLogprob(*pair) for pair in zip(ids[row][:count], values[row][:count], strict=True)),
        )
        for row, (token, count) in enumerate(zip(chosen, counts, strict=True))
    ]


def _draw(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """int64[rows]: by inversion of the cumulative distribution, one uniform number per row."""
    divisors = torch.tensor([divisor(row.sampling.temperature) for row in rows], device=logits.device)
    logits = _truncate(logits / divisors[:, None], rows)
    # In float64: rounding in a sum over 100,000 probabilities would otherwise move the borders by
    # more than the difference between two kernels' logits does.
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = uniform([row.sampling.seed for row in rows], [row.num_output for row in rows])
    target = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token_ids.clamp_(max=logits.shape[-1] - 1)


def _truncate(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Sets everything outside top-k, top-p and min-p to -inf. Ties with the last kept token are kept."""
    min_p = torch.tensor([row.sampling.min_p for row in rows], device=logits.device)
    cut = [i for i, row in enumerate(rows) if row.sampling.top_k > 0 or row.sampling.top_p < 1]
    if not cut and not bool(min_p.any()):
        return logits
    # log(0) is -inf: a row without min-p keeps everything.
    lowest = logits.amax(dim=-1) + min_p.log()
    if cut:
        index = torch.tensor(cut, device=logits.device)
        cut_rows = [rows[i] for i in cut]
        floor, found = _floor(logits[index], cut_rows, _NUCLEUS_CANDIDATES)
        if not bool(found.all()):
            missing = (~found).nonzero()[:, 0]
            floor[missing], _ = _floor(
                logits[index[missing]], [cut_rows[i] for i in missing.tolist()], logits.shape[-1]
            )
        lowest[index] = torch.maximum(lowest[index], floor)
    return logits.masked_fill(logits < lowest[:, None], -torch.inf)


def _floor(logits: Tensor, rows: Rows[Row], candidates: int) -> tuple[Tensor, Tensor]:
    """Smallest logit that top-k and then top-p keep, and whether `candidates` were enough to know: [rows] each."""
    vocab_size = logits.shape[-1]
    kept = [row.sampling.top_k if 0 < row.sampling.top_k < vocab_size else vocab_size for row in rows]
    width = min(
        vocab_size,
        max(min(k, candidates) if row.sampling.top_p < 1 else k for k, row in zip(kept, rows, strict=True)),
    )
    values = logits.topk(width, dim=-1).values
    k = torch.tensor(kept, device=logits.device)[:, None]
    outside = torch.arange(width, device=logits.device)[None] >= k
    values = values.masked_fill(outside, -torch.inf)
    # What top-p is a share of: all that top-k left.
    total = torch.where(k[:, 0] < vocab_size, values.logsumexp(dim=-1), logits.logsumexp(dim=-1))
    probabilities = (values - total[:, None]).exp()
    reached = probabilities.cumsum(dim=-1)
    # Off is beyond 1, where no rounding of the sum can reach it.
    top_p = torch.tensor([p if (p := row.sampling.top_p) < 1 else 2.0 for row in rows], device=logits.device)[
        :, None
    ]
    # The token that crosses top_p belongs to the nucleus; the first one always does.
    inside = (reached - probabilities < top_p) & ~outside
    inside[:, 0] = True
    last = inside.sum(dim=-1) - 1
    found = (k[:, 0] <= width) | (reached[:, -1] >= top_p[:, 0]) | (width == vocab_size)
    return values.gather(1, last[:, None])[:, 0], found
