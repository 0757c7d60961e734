"""Server-sent events: the framing, and the one loop that turns a generation into them.

Source: WHATWG HTML, 9.2 "Server-sent events". Lines that begin with a colon are comments, which clients
ignore: they keep a connection alive while a request waits in the queue.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgspec
import structlog

from engine_worker.protocol import Chunk
from inference.errors import ApiError, GatewayStopping, InternalError
from inference.services.fan_in import chunks_of
from inference.services.generation import Generation

log = structlog.get_logger(__name__)

KEEP_ALIVE_S: Final = 10.0
_KEEP_ALIVE: Final = b": keep-alive\n"
"""A line alone: at an empty one behind it, readers that keep the last event's id (httpx-sse, the SDKs of OpenAI and
Anthropic) find one more event, of no data."""
DONE: Final = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def event(data: Any, event_id: str = "", *, name: str = "") -> bytes:
    """One event. JSON has no raw line breaks, so the payload is one line."""
    head = f"event: {name}\n" if name else ""
    if event_id:
        head += f"id: {event_id}\n"
    return head.encode() + b"data: " + _ENCODER.encode(data) + b"\n\n"


def tells_failure(sent: bytes) -> bool:
    """Whether an event, in any framing, says that the answer failed."""
    return sent.startswith((b'data: {"error":', b"event: error\n", b"event: response.failed\n"))


def _openai_error(error: ApiError) -> bytes:
    return event({"error": error.body()})


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API puts its events on the wire, the one that tells of a failure, and what comes last."""

    event: Callable[[Any, str], bytes] = event
    error: Callable[[ApiError], bytes] = _openai_error
    done: bytes = DONE


OPENAI: Final = Framing()


def typed_event(data: msgspec.Struct, event_id: str = "") -> bytes:
    """An event that is named as its payload's `type` is: of Anthropic's API, and of OpenAI's responses."""
    return event(data, event_id, name=str(data.__struct_config__.tag))


class Stage(IntEnum):
    """What an event tells. Only the last chunk says more than one thing, and may have text without a token."""

    TOKENS = 0
    LAST_TEXT = 1
    END = 2
    USAGE = 3


_POSITION: Final = re.compile(r"([0-9]{1,9})(?:\.([1-3]))?")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far a client has read, as the id of each event says: `0` is who speaks, `12` comes with the token before
    number 12, and `14.1`, `14.2`, `14.3` are the last text, the end and the usage of an answer of 14 tokens."""

    next_seq: int = 0
    stage: Stage = Stage.TOKENS

    @classmethod
    def of(cls, data: Any, chunk: Chunk) -> Position:
        """That of one of the events that tell `chunk`."""
        if getattr(data, "is_opening", False):
            return cls(chunk.seq)
        next_seq = chunk.seq + len(chunk.token_ids)
        if chunk.finish is None:
            return cls(next_seq)
        return cls(next_seq, Stage.END if getattr(data, "is_end", False) else Stage.LAST_TEXT)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Raises ValueError."""
        if (found := _POSITION.fullmatch(text)) is None:
            raise ValueError(f"no event id of ours: {text[:40]!r}")
        return cls(int(found[1]), Stage(int(found[2] or 0)))

    def __str__(self) -> str:
        return f"{self.next_seq}.{self.stage:d}" if self.stage else str(self.next_seq)


def _bare_failure(generation: Generation, chunk: Chunk) -> ApiError | None:
    """Of a chunk that tells of nothing else."""
    is_bare = chunk.finish is not None and not chunk.token_ids and not chunk.text
    return generation.failure() if is_bare else None


async def events_of(
    generations: Sequence[Generation],
    *,
    render: Callable[[int, Chunk], Sequence[Any]],
    close: Callable[[], Sequence[Any]],
    can_resume: bool = False,
    after: Position | None = None,
    grace_s: float = 0.0,
    breaks_off: bool = True,
    begin: Callable[[], Sequence[Any]] = tuple,
    framing: Framing = OPENAI,
) -> AsyncGenerator[bytes, None]:
    """The body of a streamed answer; its first piece comes with the first token, or after KEEP_ALIVE_S.

    What ends badly before that raises ApiError: nothing has been sent, and it can still be told by a status.

    `begin` makes the events before any token, `render` those of one chunk of the n-th generation, `close`
    those after the last one. An end that is not a good one becomes an error event, after which nothing
    follows: never a false `stop`.
    With `can_resume` (one generation, one choice) each event has an id, and only those `after` that one are told. A
    client that leaves cancels what still runs, at once or, where it asked for that, when nobody resumed for `grace_s`.
    Without `breaks_off` it is not this gateway's connection alone that reads it: see `chunks_of`.
    """
    has_left, has_begun, goes_on = True, False, False
    read_to = 0

    def tell(data: Any, position: Position) -> bytes:
        """Nothing of what its client has read."""
        return b"" if after is not None and position <= after else framing.event(data, str(position))

    try:
        opening = b"".join(framing.event(data, "") for data in begin())
        async for item in chunks_of(generations, keep_alive_s=KEEP_ALIVE_S, breaks_off=breaks_off):
            if item is None:
                has_begun = True
                yield opening or _KEEP_ALIVE
                opening = b""
                continue
            index, chunk = item
            if not has_begun and (failure := _bare_failure(generations[index], chunk)) is not None:
                raise failure
            told: list[bytes] = []
            more: Chunk | None = chunk
            while more is not None:
                for data in render(index, more):
                    told.append(
                        tell(data, Position.of(data, more)) if can_resume else framing.event(data, "")
                    )
                read_to = more.seq + len(more.token_ids)
                more = generations[index].take_ready()
            if any(told):
                has_begun = True
                yield opening + b"".join(told)  # what one step made is one write
                opening = b""
            if (
                generations[index].finish is not None
                and (failure := generations[index].failure()) is not None
            ):
                raise failure
        last = Position(read_to, Stage.USAGE)
        closing = b"".join(tell(data, last) if can_resume else framing.event(data, "") for data in close())
        has_begun = True
        yield opening + closing + framing.done
        has_left = False
    except ApiError as error:
        has_left = False
        if not has_begun:
            raise
        goes_on = can_resume and isinstance(error, GatewayStopping)
        yield framing.error(error)
    except Exception:
        has_left = False
        if not has_begun:
            raise
        log.exception("stream_failed")
        yield framing.error(InternalError())
    finally:
        for generation in generations:
            if goes_on:
                generation.hand_over()
            elif has_left and grace_s:
                generation.detach(grace_s)
            else:
                generation.leave()
