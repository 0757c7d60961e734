"""`/v1/responses`: what goes out. Its stream's events are made where they are sent (api/response_shape.py)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from engine_worker.protocol import Finish


class OutputTextPart(msgspec.Struct, tag="output_text", tag_field="type", kw_only=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class OutputCall(msgspec.Struct, tag="function_call", tag_field="type", kw_only=True):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputCall


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def response_usage(finish: Finish) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=finish.prompt_tokens,
        input_tokens_details=InputDetails(finish.cached_tokens),
        output_tokens=finish.completion_tokens,
        output_tokens_details=OutputDetails(),
        total_tokens=finish.prompt_tokens + finish.completion_tokens,
    )


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    """`queued` and `in_progress`, then `completed`, `incomplete`, `failed` or `cancelled`."""
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, None] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    service_tier: str = "default"
    """What served it: `default` (the key's own tier), `flex`, or a tier's name."""
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """What every event of a stream has; the rest is its type's."""

    type: str
    sequence_number: int


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
