"""`POST /v1/chat/completions`: what comes in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine_worker.protocol import LOGPROBS_MAX
from inference.errors import InvalidRequest
from inference.schemas.sampling import (
    Choices,
    Metadata,
    Priority,
    ScoringFields,
    ServiceTier,
    StreamOptions,
    refuse_unsupported,
)
from inference.schemas.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from inference.schemas.tools import AllowedTools, NamedTool, Tool, ToolCallMade, ToolChoice

_MAX_TOKENS = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class TextPart(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(msgspec.Struct, tag="refusal", forbid_unknown_fields=True):
    """Of the assistant's, as another service gave it: its words are the message's."""

    refusal: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[ToolCallMade] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    reasoning_content: str | None = None
    """What an assistant thought before it spoke: templates that show thoughts take it."""
    reasoning: str | None = None
    """The same, by the name that some services give it."""

    @property
    def holds_refusal(self) -> bool:
        parts = self.content if isinstance(self.content, list) else ()
        return bool(self.refusal) or any(isinstance(part, RefusalPart) for part in parts)

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
        return self.content or self.refusal or ""


class ChatCompletionRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: _MAX_TOKENS | None = None
    max_tokens: _MAX_TOKENS | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    """`auto` and `default`: the key's own tier; `flex`: that of batches; or a tier by name."""
    priority: Priority | None = None
    """So many tiers after the key's own; 0 is that."""
    # Accepted; they change nothing in the answer.
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    n: Choices | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Known to clients, not honoured yet: see _NEUTRAL.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: bool | None = None
    moderation: Any = None

    def check(self) -> None:
        """What the types can't say. Raises InvalidRequest."""
        refuse_unsupported(self, _NEUTRAL)
        self.refuse_streamed_scores()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' needs 'stream': true.", param="stream_options")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        for index, message in enumerate(self.messages):
            refuse_unsupported(message, _NEUTRAL_MESSAGE)
            if message.role == "tool" and not message.tool_call_id:
                raise InvalidRequest(
                    f"messages[{index}] answers a tool call: it needs 'tool_call_id'.",
                    param=f"messages[{index}].tool_call_id",
                )
            if message.role != "assistant" and message.holds_refusal:
                raise InvalidRequest(
                    f"messages[{index}] holds a refusal: only the assistant's messages may.",
                    param=f"messages[{index}]",
                )
            if message.content is None and not message.tool_calls and not message.refusal:
                raise InvalidRequest(
                    f"messages[{index}] has no 'content': give a string or a list of text parts.",
                    param=f"messages[{index}].content",
                )

    def forms(self) -> dict[str, tuple[str, Any]]:
        forms = super().forms()
        if isinstance(self.response_format, JsonObjectFormat):
            forms["response_format"] = ("json_object", True)
        elif isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.definition
            forms["response_format"] = ("json", {} if schema is None else schema)
        return forms

    def active_tools(self) -> list[Tool]:
        """What the model may call, if anything. Raises InvalidRequest."""
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("Two tools have the same name: give each its own.", param="tools")
        if self.tool_choice in (None, "auto", "none"):
            return [] if self.tool_choice == "none" else tools
        if not tools:
            raise InvalidRequest(
                "'tool_choice' needs 'tools': give some, or leave it out.", param="tool_choice"
            )
        wanted = _tools_named(self.tool_choice)
        if missing := [name for name in wanted if name not in names]:
            raise InvalidRequest(
                f"'tool_choice' names '{missing[0]}', which is not among 'tools': add it there, or name one of them.",
                param="tool_choice",
            )
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in tools if tool.function.name in wanted]
        return tools

    def forced_tools(self) -> list[Tool]:
        """One of which must be called."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.active_tools() if tool.function.name == choice.function.name]
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return self.active_tools() if mode == "required" else []

    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def num_choices(self) -> int:
        return self.n or 1

    @property
    def requested_tokens(self) -> int | None:
        """`max_completion_tokens` wins over its older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _tools_named(choice: ToolChoice | None) -> list[str]:
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedTools):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "moderation": (),
}
_NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
}
