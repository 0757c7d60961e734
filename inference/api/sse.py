"""Server-sent events: the framing, and the one loop that turns a generation into them.

Source: WHATWG HTML, 9.2 "Server-sent events". Lines that begin with a colon are comments, which clients
ignore: they keep a connection alive while a request waits in the queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import msgspec
import structlog

from engine_worker.protocol import Chunk
from inference.errors import ApiError, GenerationFailed
from inference.services.fan_in import chunks_of
from inference.services.generation import Generation

log = structlog.get_logger(__name__)

KEEP_ALIVE_S: Final = 10.0
QUEUED: Final = b": queued\n\n"
DONE: Final = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """One event. JSON has no raw line breaks, so the payload is one line."""
    return b"data: " + _ENCODER.encode(data) + b"\n\n"


async def events_of(
    generations: Sequence[Generation],
    *,
    render: Callable[[int, Chunk], Sequence[Any]],
    close: Callable[[], Sequence[Any]],
) -> AsyncIterator[bytes]:
    """The body of a streamed answer.

    `render` makes the events of one chunk of the n-th generation, `close` those after the last one. An
    end that is not a good one becomes an error event, after which nothing follows: never a false `stop`.
    A client that leaves cancels what still runs.
    """
    yield QUEUED  # sends the headers, and tells proxies that something lives
    try:
        async for item in chunks_of(generations, keep_alive_s=KEEP_ALIVE_S):
            if item is None:
                yield b": keep-alive\n\n"
                continue
            index, chunk = item
            for data in render(index, chunk):
                yield event(data)
            if chunk.finish is not None and (failure := generations[index].failure()) is not None:
                raise failure
        for data in close():
            yield event(data)
        yield DONE
    except ApiError as error:
        yield event({"error": error.body()})
    except Exception:
        log.exception("stream_failed")
        yield event({"error": GenerationFailed("The server had an error.", code="internal_error").body()})
    finally:
        for generation in generations:
            generation.leave()
