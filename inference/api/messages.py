"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over our chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.protocol import Chunk, Finish, FinishReason
from inference.api.endpoint import ApiCall, endpoint
from inference.api.error_shapes import anthropic_error
from inference.api.sse import Framing, event, events_of, typed_event
from inference.errors import ApiError
from inference.schemas import message_answers as out
from inference.schemas.messages import CountTokensRequest, MessageRequest
from inference.services.chat import Chat, start_chat
from inference.services.fan_in import chunks_of
from inference.services.prepare import tokenise_chat
from inference.tool_calls import CallStarted, Part
from tenants.principal import Scope

_PATIENCE_S = 10.0


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=MessageRequest,
    answer=out.MessageOut,
    events=(out.MessageEvent,),
    headers=(
        "Idempotency-Key",
        "x-weir-deadline-s",
    ),
    generates=True,
    is_anthropic=True,
)
async def messages(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    """Answers a conversation as Anthropic's API does, whole or streamed."""
    body = call.read(MessageRequest)
    chat = await start_chat(
        call.runtime,
        call.principal,
        body.chat(),
        endpoint="messages",
        request_id=call.new_request_id("msg"),
        is_streamed=bool(body.stream),
        may_exist=call.may_exist,
    )
    shape = MessageShape(chat)
    if body.stream:
        events = events_of(
            [chat.generation],
            begin=shape.first_events,
            render=shape.events,
            close=shape.last_events,
            framing=ANTHROPIC,
            breaks_off=not call.may_exist,
        )
        return await call.stream(events, headers=chat.generation.headers)
    async with chat.generation as generation:
        breaks_off = not call.may_exist
        async for item in chunks_of([generation], keep_alive_s=_PATIENCE_S, breaks_off=breaks_off):
            if item is not None:
                shape.add(item[1])
        if (failure := generation.failure()) is not None:
            raise failure
    return call.respond(shape.whole(), headers=generation.headers())


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=CountTokensRequest,
    answer=out.TokenCount,
    errors=(404,),
    is_anthropic=True,
)
async def count_tokens(call: ApiCall) -> HttpResponse:
    """How many tokens a conversation has."""
    body = call.read(CountTokensRequest)
    chat = body.to_chat()
    model = await call.runtime.models.get(
        chat.model, tenant_public_id=call.principal.tenant_public_id, kind="generate"
    )
    prompt = await tokenise_chat(call.runtime.models, model, chat.messages, None, chat.active_tools())
    return call.respond(out.TokenCount(len(prompt)))


def _error_event(error: ApiError) -> bytes:
    return event(anthropic_error(error), name="error")


ANTHROPIC = Framing(event=typed_event, error=_error_event, done=b"")


class MessageShape:
    """A chat in Anthropic's words: content blocks one after another, whole or as events."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._blocks: list[out.BlockOut] = []
        self._arguments = ""
        """JSON text of the last block's input, where that is a tool's."""

    def first_events(self) -> Sequence[Any]:
        usage = out.MessageUsage(input_tokens=self._chat.prompt_tokens, output_tokens=0)
        return [out.MessageStart(self._message(usage, None))]

    def events(self, _index: int, chunk: Chunk) -> Sequence[Any]:
        return list(self._events(chunk))

    def last_events(self) -> Sequence[Any]:
        usage = out.message_usage(self._finish)
        stop = out.StopDelta(self._stop_reason(), self._stop_sequence())
        return [*self._end_block(), out.MessageDelta(stop, usage), out.MessageStop()]

    def add(self, chunk: Chunk) -> None:
        for _ in self._events(chunk):
            pass

    def whole(self) -> out.MessageOut:
        for _ in self._end_block():
            pass
        return self._message(out.message_usage(self._finish), self._stop_reason())

    @property
    def _finish(self) -> Finish:
        finish = self._chat.generation.finish
        assert finish is not None
        return finish

    def _events(self, chunk: Chunk) -> Iterator[Any]:
        for part in self._chat.parts(chunk):
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[Any]:
        if isinstance(part, str):
            if not self._blocks or not isinstance(self._blocks[-1], out.TextOut):
                yield from self._begin_block(out.TextOut(""))
            block = self._blocks[-1]
            assert isinstance(block, out.TextOut)
            block.text += part
            yield out.BlockDelta(len(self._blocks) - 1, out.TextDelta(part))
        elif isinstance(part, CallStarted):
            call_id = "toolu_" + part.id.removeprefix("call_")
            yield from self._begin_block(out.ToolUseOut(call_id, part.name, {}))
        else:
            self._arguments += part.text
            yield out.BlockDelta(len(self._blocks) - 1, out.InputJsonDelta(part.text))

    def _begin_block(self, block: out.BlockOut) -> Iterator[Any]:
        yield from self._end_block()
        self._blocks.append(block)
        # As it is now: the same object takes up what follows.
        empty = out.TextOut("") if isinstance(block, out.TextOut) else block
        yield out.BlockStart(len(self._blocks) - 1, empty)

    def _end_block(self) -> Iterator[Any]:
        if not self._blocks:
            return
        block = self._blocks[-1]
        if isinstance(block, out.ToolUseOut):
            block.input, self._arguments = _object(self._arguments), ""
        yield out.BlockStop(len(self._blocks) - 1)

    def _message(self, usage: out.MessageUsage, stop_reason: str | None) -> out.MessageOut:
        return out.MessageOut(
            id=self._chat.generation.ticket.request_id,
            model=self._chat.name,
            content=list(self._blocks),
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence() if stop_reason else None,
            usage=usage,
        )

    def _stop_reason(self) -> str:
        if any(isinstance(block, out.ToolUseOut) for block in self._blocks):
            return "tool_use"
        if self._finish.reason != FinishReason.STOP:
            return "max_tokens"
        return "stop_sequence" if self._stop_sequence() else "end_turn"

    def _stop_sequence(self) -> str | None:
        reason = self._finish.stop_reason
        return reason if isinstance(reason, str) else None


def _object(text: str) -> dict[str, Any]:
    """A tool's arguments; of a call that was cut off, nothing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
