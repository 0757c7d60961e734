"""Whole generations, for answers that are not streamed."""

from __future__ import annotations

from collections.abc import Sequence

from engine_worker.protocol import Chunk
from inference.services.choices import Choice
from inference.services.fan_in import chunks_of
from inference.services.generation import Generation

_PATIENCE_S = 10.0


async def collect(generations: Sequence[Generation], *, n: int = 1, breaks_off: bool = False) -> list[Choice]:
    """`n` choices per generation, in order. Raises ApiError when one ends badly; the others are cancelled then.

    A client that leaves cancels this coroutine, and with it what still runs.
    """
    choices = [Choice() for _ in range(n * len(generations))]
    try:
        async for item in chunks_of(generations, keep_alive_s=_PATIENCE_S, breaks_off=breaks_off):
            if item is None:
                continue
            index, chunk = item
            choices[index * n + chunk.index].add(chunk)
            if chunk.finish is not None and (failure := generations[index].failure()) is not None:
                raise failure
    finally:
        for generation in generations:
            generation.leave()
    return choices


async def last_chunk(generation: Generation) -> Chunk:
    """Where all of the answer is. Raises ApiError when it ends badly; a client that leaves cancels it."""
    async with generation:
        while (chunk := await generation.next(_PATIENCE_S)) is None or chunk.finish is None:
            pass
    if (failure := generation.failure()) is not None:
        raise failure
    return chunk
