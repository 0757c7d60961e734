"""Sampling as a graph: what `engine/sampler.py` does, for all rows at once, over memory that never moves.

No shape depends on data and the host waits for nothing. Noise is the reference's own, a function of (seed, output
position): the host knows both before it knows a token. What penalties count is read from the token cache, which
lies in blocks beside keys and values; so there is no running state, and a step that is made again gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.engine.noise import uniform
from engine_worker.engine.temperature import divisor
from engine_worker.runner.nucleus import floors

if TYPE_CHECKING:
    from engine_worker.protocol import SamplingParams


class Level(IntEnum):
    """How much of sampling a step needs: each does what those below it do."""

    GREEDY = 0
    DRAWN = 1
    """Temperature, min-p."""
    SHAPED = 2
    """Top-k, top-p, penalties, changes."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """One row's part: whoever a token is chosen for."""

    sampling: SamplingParams
    num_prompt: int
    length: int
    """Tokens in the cache when it is chosen, prompt and output."""
    blocks: Rows[int] = ()
    changes: Rows[tuple[int, float]] = ()
    """What is added to the logits of some tokens, after penalties; -inf forbids one."""

    @property
    def level(self) -> Level:
        sampling = self.sampling
        if self.has_penalty or self.changes:
            return Level.SHAPED
        if sampling.temperature <= 0:
            return Level.GREEDY
        return Level.SHAPED if sampling.top_k > 0 or sampling.top_p < 1 else Level.DRAWN

    @property
    def has_penalty(self) -> bool:
        sampling = self.sampling
        return bool(
            sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
        )


MAX_CHANGES: Final = 4096
"""Of a step."""

_DTYPES: Final[dict[str, tuple[Any, torch.dtype]]] = {
    "noise": (np.float64, torch.float64),
    "frequency": (np.float64, torch.float64),
    "presence": (np.float64, torch.float64),
    "temperature": (np.float32, torch.float32),
    "min_p": (np.float32, torch.float32),
    "top_p": (np.float32, torch.float32),
    "repetition": (np.float32, torch.float32),
    "top_k": (np.int32, torch.int32),
    "num_prompt": (np.int32, torch.int32),
    "lengths": (np.int32, torch.int32),
    "changed": (np.int32, torch.int32),
    "change": (np.float32, torch.float32),
    "tables": (np.int32, torch.int32),
}
"""Of a step's settings, in the order in which they lie in one array of int32. The wide ones come first: aligned."""


def _counts(rows: int, blocks: int) -> list[int]:
    """How many int32 each takes."""
    special = {"changed": MAX_CHANGES, "change": MAX_CHANGES, "tables": rows * blocks}
    return [special.get(name, rows) * (kind.itemsize // 4) for name, (_, kind) in _DTYPES.items()]


def settings_size(rows: int, blocks: int) -> int:
    return sum(_counts(rows, blocks))


def pack(choosing: Rows[Choosing], rows: int, blocks: int, vocab_size: int) -> NDArray[np.int32]:
    """int32[settings_size]. Rows beyond those that choose are greedy."""
    flat = np.zeros(settings_size(rows, blocks), np.int32)
    ends = np.cumsum(_counts(rows, blocks))[:-1]
    part: dict[str, Any] = {
        name: piece.view(kind)
        for (name, (kind, _)), piece in zip(_DTYPES.items(), np.split(flat, ends), strict=True)
    }
    part["top_p"][:] = part["repetition"][:] = 1
    n = len(choosing)
    samplings = [one.sampling for one in choosing]
    part["temperature"][:n] = [divisor(one.temperature) for one in samplings]
    part["min_p"][:n] = [one.min_p for one in samplings]
    part["top_p"][:n] = [one.top_p for one in samplings]
    part["top_k"][:n] = [one.top_k for one in samplings]
    part["noise"][:n] = uniform(
        [one.seed for one in samplings], [one.length - one.num_prompt for one in choosing]
    )
    tables, used = part["tables"].reshape(rows, blocks), 0
    for row, one in enumerate(choosing):
        if one.has_penalty:
            part["frequency"][row] = one.sampling.frequency_penalty
            part["presence"][row] = one.sampling.presence_penalty
            part["repetition"][row] = one.sampling.repetition_penalty
            part["num_prompt"][row], part["lengths"][row] = one.num_prompt, one.length
            tables[row, : len(one.blocks)] = one.blocks
        if one.changes:
            end = used + len(one.changes)
            part["changed"][used:end] = [row * vocab_size + token for token, _ in one.changes]
            part["change"][used:end] = [value for _, value in one.changes]
            used = end
    return flat


class Settings:
    """A step's settings on the device: views of `flat`, int32[settings_size]."""

    def __init__(self, flat: Tensor, rows: int, blocks: int) -> None:
        counts = _counts(rows, blocks)
        pieces = torch.split(flat[: sum(counts)], counts)
        part = {
            name: piece.view(kind) for (name, (_, kind)), piece in zip(_DTYPES.items(), pieces, strict=True)
        }
        self.noise, self.frequency, self.presence = part["noise"], part["frequency"], part["presence"]
        self.temperature, self.min_p, self.top_p = part["temperature"], part["min_p"], part["top_p"]
        self.repetition, self.top_k, self.num_prompt = part["repetition"], part["top_k"], part["num_prompt"]
        self.lengths, self.changed, self.change = part["lengths"], part["changed"], part["change"]
        self.tables = part["tables"].view(rows, blocks)


def choose(logits: Tensor, settings: Settings, tokens: Tensor, level: Level) -> Tensor:
    """int64[rows]: the next token of each row, -1 where the model gave no finite logit to choose from.

    `logits`: float32[rows, vocabulary], not changed. `tokens`: int32[blocks, block_size], the token cache.
    """
    if level >= Level.SHAPED:
        logits = _shape(logits, settings, tokens)
    best = logits.argmax(dim=-1)
    # NaN counts as the largest: the chosen value tells such a row, and one where all is forbidden.
    usable = logits.gather(1, best[:, None])[:, 0].isfinite()
    if level >= Level.DRAWN:
        best = torch.where(settings.temperature > 0, _draw(logits, settings, level), best)
    return torch.where(usable, best, -1)


def _shape(logits: Tensor, settings: Settings, tokens: Tensor) -> Tensor:
    """Penalties, then changes. See `engine/penalties.py`."""
    rows, vocab_size = logits.shape
    context = tokens[settings.tables.long()].flatten(1).long()
    position = torch.arange(context.shape[1], device=logits.device)[None]
    seen = position < settings.lengths[:, None]
    repeated = _count(context, seen, vocab_size) > 0
    penalty = settings.repetition[:, None]
    logits = torch.where(repeated, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    counts = _count(context, seen & (position >= settings.num_prompt[:, None]), vocab_size)
    penalties = settings.frequency[:, None] * counts + settings.presence[:, None]
    logits = logits - torch.where(counts > 0, penalties, 0).float()
    # Where nothing is to be changed, the first token of the first row is: by 0.
    return logits.reshape(-1).scatter_add(0, settings.changed.long(), settings.change).view(rows, vocab_size)


def _count(context: Tensor, wanted: Tensor, vocab_size: int) -> Tensor:
    """int32[rows, vocab_size]: how often each token is in its row's wanted context, int64[rows, tokens]."""
    # What is not wanted is counted as a token that there is not.
    column = torch.where(wanted, context, vocab_size).clamp(max=vocab_size)
    counts = torch.zeros(len(context), vocab_size + 1, dtype=torch.int32, device=context.device)
    return counts.scatter_add_(1, column, torch.ones_like(column, dtype=torch.int32))[:, :vocab_size]


def _draw(logits: Tensor, settings: Settings, level: Level) -> Tensor:
    """int64[rows]: by inversion of the cumulative distribution, as the reference draws."""
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
    logits = logits / temperature[:, None]
    # log(0) is -inf: a row without min-p keeps everything.
    lowest = logits.amax(dim=-1) + settings.min_p.log()
    if level >= Level.SHAPED:
        lowest = torch.maximum(lowest, floors(logits, settings.top_k, settings.top_p))
    kept = logits.masked_fill(logits < lowest[:, None], -torch.inf)
    cumulative = kept.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = settings.noise[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return drawn.clamp(max=logits.shape[-1] - 1)
