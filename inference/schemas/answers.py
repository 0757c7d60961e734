"""What goes out: the response shapes of chat completions and completions, as msgspec structs.

Every key that clients look for is always there; optional ones that Weir never sends are left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine_worker.protocol import Finish
from inference.schemas.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(*finishes: Finish) -> Usage:
    """Summed over the prompts. Several choices of one prompt count it once."""
    prompt = sum(finish.prompt_tokens for finish in finishes)
    completion = sum(finish.completion_tokens for finish in finishes)
    cached = sum(finish.cached_tokens for finish in finishes)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(),
    )


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str = msgspec.field(default_factory=str)


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatAnswerMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str
    """What served it: `default` (the key's own tier), `flex`, or a tier's name."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """Where asked for."""


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    service_tier: str
    """As above; of a stream that is read again `flex` is the tier of batches by whatever name it was asked for."""
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """Unset unless the client asked for the usage chunk; then null in every chunk but the last."""

    @property
    def is_opening(self) -> bool:
        """It says who speaks, and nothing of what is said."""
        return bool(self.choices) and self.choices[0].delta.role is not None

    @property
    def is_end(self) -> bool:
        return bool(self.choices) and self.choices[0].finish_reason is not None


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """Where asked for; the same for all choices of one prompt."""


class Completion(msgspec.Struct, kw_only=True):
    """Also the chunk of a streamed completion: the specification gives both one shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def is_end(self) -> bool:
        """Of a stream's chunk: its choice has no other."""
        return bool(self.choices) and self.choices[0].finish_reason is not None


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "weir"
    max_model_len: int
    """As vLLM reports it: the longest prompt and answer together, in tokens."""
    type: Literal["model"] = "model"
    """From here on as Anthropic's SDKs read it."""
    display_name: str
    created_at: int
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(msgspec.Struct, kw_only=True):
    """All of them, which is one page for Anthropic's SDKs."""

    data: list[ModelObject]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str | None
    last_id: str | None
