"""`POST /v1/responses`: what comes in, and the same as a chat of ours.

Fields: OpenAI's specification, "Create a model response".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from inference.errors import InvalidRequest
from inference.schemas.chat import ChatCompletionRequest, ChatMessage
from inference.schemas.reading import read_value
from inference.schemas.sampling import Metadata, ServiceTier, refuse_unsupported
from inference.schemas.structured import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from inference.schemas.tools import (
    Allowance,
    AllowedTools,
    FunctionCalled,
    FunctionDefinition,
    FunctionName,
    FunctionNamed,
    NamedTool,
    Tool,
    ToolAllowed,
    ToolCallMade,
    ToolChoice,
)


class InputText(msgspec.Struct, tag="input_text", forbid_unknown_fields=True):
    text: str


class TextAlone(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An input text where nothing else may stand: msgspec asks for a tag only where it tells kinds apart."""

    type: Literal["input_text"]
    text: str


class OutputText(msgspec.Struct, tag="output_text", kw_only=True, forbid_unknown_fields=True):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(msgspec.Struct, tag="refusal", forbid_unknown_fields=True):
    """Of the assistant's, as another service gave it: its words are the message's."""

    refusal: str


class MessageItem(msgspec.Struct, tag="message", kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class CallItem(msgspec.Struct, tag="function_call", kw_only=True, forbid_unknown_fields=True):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, tag="function_call_output", kw_only=True, forbid_unknown_fields=True):
    call_id: str
    output: str | list[TextAlone]
    id: str | None = None
    status: str | None = None

    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


Item: TypeAlias = MessageItem | CallItem | CallOutputItem


class ResponseTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseToolNamed(msgspec.Struct, tag="function", kw_only=True, forbid_unknown_fields=True):
    name: str


class ResponseToolAllowed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ResponseAllowedTools(msgspec.Struct, tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """As in chat completions: the model is told of these of `tools`, and of no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolAllowed], Meta(min_length=1, max_length=128)]


ResponseToolChoice: TypeAlias = Literal["none", "auto", "required"] | ResponseToolNamed | ResponseAllowedTools


class SchemaText(
    msgspec.Struct,
    tag="json_schema",
    kw_only=True,
    rename={"definition": "schema"},
    forbid_unknown_fields=True,
):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    definition: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaText | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsePrompt(msgspec.Struct, kw_only=True):
    """What is counted: the part that becomes the prompt, and what can't be done with it."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Known to clients, not honoured: see _NEUTRAL_PROMPT.
    conversation: Any = None
    reasoning: Any = None
    truncation: str | None = None

    def check(self) -> None:
        """What the types can't say. Raises InvalidRequest."""
        refuse_unsupported(self, _NEUTRAL_PROMPT)

    def items(self) -> list[dict[str, Any]]:
        """The input as items, each with its type. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        items = [{"type": "message", **item} for item in self.input]
        for index, item in enumerate(items):
            read_value(item, Item, where=f"input[{index}]")
        return items

    def to_chat(self, items: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
        """The conversation of `items` in the words of chat completions, checked. Raises InvalidRequest."""
        chat = ChatCompletionRequest(
            model=self.model,
            messages=_messages(self.instructions, items),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            **self.more_of_chat(),
        )
        chat.check()
        return chat

    def more_of_chat(self) -> dict[str, Any]:
        return {}


class InputTokensRequest(ResponsePrompt, kw_only=True, forbid_unknown_fields=True):
    pass


class ResponseRequest(ResponsePrompt, kw_only=True, forbid_unknown_fields=True):
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Ours, as in chat completions."""
    service_tier: ServiceTier | None = None
    """As in chat completions."""
    # Accepted; they change nothing in the answer.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    include: list[str] | None = None
    """What Weir has none of, reasoning for one, is not there to be included."""
    # Known to clients, not honoured: see _NEUTRAL.
    context_management: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        refuse_unsupported(self, _NEUTRAL)
        if self.background and self.store is False:
            raise InvalidRequest(
                "'background' needs 'store', as its answer is fetched later: leave one of them out.",
                param="store",
            )
        if self.background and self.stream:
            raise InvalidRequest(
                "'stream' and 'background' together are not supported: leave one out.",
                param="stream",
                code="unsupported_parameter",
            )

    def more_of_chat(self) -> dict[str, Any]:
        return {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
}
_NEUTRAL_PROMPT: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
}


def _messages(instructions: str | None, items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """A turn of the assistant's may be several items: its words and its calls are one message."""
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    for given in items:
        item: Item = msgspec.convert(given, Item)
        if isinstance(item, MessageItem):
            messages.append(ChatMessage(role=item.role, content=item.text()))
        elif isinstance(item, CallOutputItem):
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=item.text()))
        else:
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant", content=""))
            call = ToolCallMade(item.call_id, "function", FunctionCalled(item.name, item.arguments))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    return messages


def _tool(tool: ResponseTool) -> Tool:
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: ResponseToolChoice | None) -> ToolChoice | None:
    if isinstance(choice, ResponseToolNamed):
        return NamedTool(FunctionNamed(choice.name))
    if isinstance(choice, ResponseAllowedTools):
        allowed = [ToolAllowed("function", FunctionNamed(tool.name)) for tool in choice.tools]
        return AllowedTools(Allowance(choice.mode, allowed))
    return choice


def _format(text: TextConfig | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    form = text.format if text else None
    if isinstance(form, SchemaText):
        return JsonSchemaFormat(JsonSchema(form.name, form.definition, form.description, form.strict))
    return form if isinstance(form, JsonObjectFormat) else None
