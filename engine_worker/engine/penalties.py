"""Changes to the logits that depend on a request's own tokens: bias, penalties, bad words, min_tokens.

Counted from the whole token list each time. No running state means nothing to keep right through
preemption, resumption or a token that is still in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from engine_worker.engine.row import Row
from engine_worker.protocol import SamplingParams


def apply(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """`logits`: float32[rows, vocab]. Returned as they are if no row needs a change, else a changed copy."""
    concerned = [i for i, row in enumerate(rows) if _needs_change(row)]
    if not concerned:
        return logits
    logits = logits.clone()
    for i in concerned:
        _apply_to_row(logits[i], rows[i])
    return logits


def _needs_change(row: Row) -> bool:
    return bool(row.sampling.logit_bias or row.bad_words) or _has_penalty(row.sampling) or _must_go_on(row)


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    )


def _must_go_on(row: Row) -> bool:
    return bool(row.stop_ids) and row.num_output < row.sampling.min_tokens


def _has_begun(word: tuple[int, ...], row: Row) -> bool:
    """Whether the output ends in all of `word` but its last token."""
    before = len(word) - 1
    return row.num_output >= before and (before == 0 or row.token_ids[-before:] == list(word[:-1]))


def _apply_to_row(logits: Tensor, row: Row) -> None:
    """In place on `logits`: float32[vocab]."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1:
        seen = _on_device(np.unique(row.token_ids), logits)
        seen = seen[seen < logits.shape[0]]
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and row.num_output:
        ids, counts = np.unique(row.token_ids[row.num_prompt :], return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[_on_device(ids, logits)] -= _on_device(penalties.astype(np.float32), logits)
    if sampling.logit_bias:
        ids_and_bias = np.array(list(sampling.logit_bias.items()))
        logits[_on_device(ids_and_bias[:, 0].astype(np.int64), logits)] += _on_device(
            ids_and_bias[:, 1].astype(np.float32), logits
        )
    if row.bad_words:
        logits[[word[-1] for word in row.bad_words if _has_begun(word, row)]] = -torch.inf
    if _must_go_on(row):
        logits[list(row.stop_ids)] = -torch.inf


def _on_device(array: np.ndarray[tuple[int], np.dtype[np.generic]], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
