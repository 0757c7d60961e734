"""`POST /v1/messages`: what comes in, in Anthropic's words, and the same as a chat of ours.

Fields: Anthropic's API reference, "Create a Message".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from inference.errors import InvalidRequest
from inference.schemas.chat import ChatCompletionRequest, ChatMessage
from inference.schemas.sampling import STOPS_MAX, Probability, refuse_unsupported
from inference.schemas.structured import JsonSchema, JsonSchemaFormat
from inference.schemas.tools import (
    FunctionCalled,
    FunctionDefinition,
    FunctionName,
    FunctionNamed,
    NamedTool,
    Tool,
    ToolCallMade,
)

THREAD_UNSUPPORTED: Final = "thread_unsupported_request"
"""The code after which Anthropic's tool runners go on without a thread."""


class TextBlock(msgspec.Struct, tag="text", kw_only=True, forbid_unknown_fields=True):
    text: str
    cache_control: dict[str, Any] | None = None
    """Accepted: Weir's prefix cache needs no marks."""
    citations: list[Any] | None = None


class TextAlone(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The same where nothing else may stand: msgspec asks for a tag only where it tells kinds apart."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ToolUseBlock(msgspec.Struct, tag="tool_use", kw_only=True, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, tag="tool_result", kw_only=True, forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[TextAlone] = ""
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Block: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """Arguments are always sent as they come."""


class MessageToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingDisabled(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["disabled"]


class JsonOutput(msgspec.Struct, kw_only=True, rename={"definition": "schema"}, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    definition: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: JsonOutput | None = None


class MessageMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Prompt(msgspec.Struct, kw_only=True):
    """What is counted: the part that becomes the prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: str | list[TextAlone] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=128)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def check(self) -> None:
        """What the types can't say. Raises InvalidRequest."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "The last message is the assistant's: continuing its words is not supported. "
                "End with a message of the user's.",
                param="messages",
                code="unsupported_parameter",
            )
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and not choice.name:
            raise InvalidRequest("tool_choice 'tool' needs the tool's 'name'.", param="tool_choice.name")

    def to_chat(self, **more: Any) -> ChatCompletionRequest:
        """The same in the words of chat completions, checked. Raises InvalidRequest."""
        self.check()
        choice = self.tool_choice
        chat = ChatCompletionRequest(
            model=self.model,
            messages=list(self._conversation()),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_tool_choice(choice) if choice else None,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=self._response_format(),
            **more,
        )
        chat.check()
        return chat

    def _conversation(self) -> Iterator[ChatMessage]:
        if self.system:
            yield ChatMessage(role="system", content=_text(self.system))
        for index, message in enumerate(self.messages):
            yield from _turn(message, f"messages[{index}]")

    def _response_format(self) -> JsonSchemaFormat | None:
        wanted = self.output_config.format if self.output_config else None
        return JsonSchemaFormat(JsonSchema("output", wanted.definition)) if wanted else None


class CountTokensRequest(Prompt, kw_only=True, forbid_unknown_fields=True):
    pass


class MessageRequest(Prompt, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    """Accepted; it changes nothing in the answer."""
    # Ours, as in chat completions.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_p: Probability | None = None
    # Known to clients, not honoured: see _NEUTRAL.
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    speed: str | None = None
    thread: Any = None

    def check(self) -> None:
        super().check()
        refuse_unsupported(self, _NEUTRAL)
        if self.thread is not None:
            raise InvalidRequest(
                "'thread' is not supported: send the whole conversation.",
                param="thread",
                code=THREAD_UNSUPPORTED,
            )
        stops = self.stop_sequences or []
        if len(stops) > STOPS_MAX or not all(stops):
            raise InvalidRequest(
                f"'stop_sequences' takes at most {STOPS_MAX} strings, none of them empty.",
                param="stop_sequences",
            )

    def chat(self) -> ChatCompletionRequest:
        """Raises InvalidRequest."""
        return self.to_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_p=self.min_p,
        )


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "context_management": (),
    "speed": ("standard",),
}


def _turn(message: InputMessage, where: str) -> Iterator[ChatMessage]:
    """One message of theirs is several of ours where it answers tool calls."""
    blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    texts: list[str] = []
    calls: list[ToolCallMade] = []
    has_results = False
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            if message.role != "assistant":
                raise InvalidRequest(
                    "Only the assistant's messages hold 'tool_use' blocks.", param=f"{where}.content[{index}]"
                )
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(ToolCallMade(block.id, "function", FunctionCalled(block.name, arguments)))
        else:
            if message.role != "user" or texts:
                raise InvalidRequest(
                    "'tool_result' blocks come first in a message of the user's.",
                    param=f"{where}.content[{index}]",
                )
            has_results = True
            yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content))
    if texts or calls or not has_results:
        yield ChatMessage(role=message.role, content="".join(texts), tool_calls=calls or None)


def _text(content: str | list[TextAlone]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: MessageTool) -> Tool:
    definition = FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool("function", definition)


def _tool_choice(choice: MessageToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type == "tool":
        return NamedTool(FunctionNamed(choice.name or ""))
    return "required" if choice.type == "any" else choice.type
