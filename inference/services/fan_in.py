"""Several generations as one stream of (index, chunk): the choices of one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine_worker.protocol import Chunk
from inference.errors import GatewayStopping
from inference.services.generation import Generation


async def chunks_of(
    generations: Sequence[Generation], *, keep_alive_s: float, breaks_off: bool = False
) -> AsyncIterator[tuple[int, Chunk] | None]:
    """Chunks as they come, until every generation has ended; None after `keep_alive_s` of silence.

    Raises ApiError when one of them breaks off; with `breaks_off`, for who answers a connection that ends with this
    gateway, also when that is being stopped.
    """
    if len(generations) == 1:
        # The usual case needs no tasks.
        (only,) = generations
        while only.finish is None:
            chunk = await only.next(keep_alive_s)
            if chunk is None and breaks_off and only.is_cut_short:
                raise GatewayStopping
            yield None if chunk is None else (0, chunk)
        return
    waiting = {
        asyncio.create_task(generation.next(keep_alive_s), name=f"choice-{index}"): index
        for index, generation in enumerate(generations)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                chunk = task.result()
                if chunk is None and breaks_off and generations[index].is_cut_short:
                    raise GatewayStopping
                yield None if chunk is None else (index, chunk)
                generation = generations[index]
                if generation.finish is None:
                    again = asyncio.create_task(generation.next(keep_alive_s), name=f"choice-{index}")
                    waiting[again] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
