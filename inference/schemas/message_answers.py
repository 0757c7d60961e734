"""`POST /v1/messages`: what goes out, whole or as events; each event's name is its `type`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from engine_worker.protocol import Finish


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` is without what came from the cache, as in Anthropic's API."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


def message_usage(finish: Finish) -> MessageUsage:
    return MessageUsage(
        input_tokens=finish.prompt_tokens - finish.cached_tokens,
        output_tokens=finish.completion_tokens,
        cache_read_input_tokens=finish.cached_tokens,
    )


class TextOut(msgspec.Struct, tag="text"):
    text: str


class ToolUseOut(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


BlockOut: TypeAlias = TextOut | ToolUseOut


class MessageOut(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageOut


class BlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: BlockOut


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


MessageEvent: TypeAlias = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(msgspec.Struct):
    input_tokens: int
