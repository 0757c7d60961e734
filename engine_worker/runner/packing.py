"""A step's scheduled tokens as one packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.attention.interface import Segment
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.sequence import Choice


@dataclass(frozen=True, slots=True)
class Packed:
    token_ids: list[int]
    """0 where the host does not know it yet."""
    positions: list[int]
    segments: list[Segment]
    """Single tokens first: the attention backends take them as one group."""
    sampled: list[int]
    """Rows whose logits are asked for, in the step's order."""
    unknown: dict[int, Choice]
    """By row: the choice of the step before that its token is."""


def pack(step: Sequence[Scheduled], block_size: int) -> Packed:
    packed = Packed([], [], [], [], {})
    last_rows: dict[int, int] = {}
    for item in sorted(step, key=lambda item: item.num_tokens > 1):
        sequence, end, first = item.sequence, item.start + item.num_tokens, len(packed.token_ids)
        # A copy: the step after this one may be given more of them meanwhile.
        blocks = item.blocks[: -(-end // block_size)]
        packed.segments.append(Segment(first, item.num_tokens, end, blocks, sequence.request.adapter))
        packed.token_ids.extend(_token_ids(item, packed))
        packed.positions.extend(range(item.start, end))
        last_rows[sequence.uid] = len(packed.token_ids) - 1
    for item in step:
        last = last_rows[item.sequence.uid]
        packed.sampled.extend(range(last + 1 - item.num_logits, last + 1))
    return packed


def _token_ids(item: Scheduled, packed: Packed) -> list[int]:
    if item.awaits is None or item.awaits.token_id is not None:
        return item.token_ids
    # It is the last one: whoever has a draft waits for the token first.
    packed.unknown[len(packed.token_ids) + item.num_tokens - 1] = item.awaits
    return [*item.sequence.token_ids[item.start : item.known], 0]
