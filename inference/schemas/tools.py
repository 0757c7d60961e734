"""Tools as clients give them, and tool calls as they come back in a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

FunctionName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Where a call is forced its arguments always follow `parameters`."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionNamed(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, tag="function", forbid_unknown_fields=True):
    function: FunctionNamed


class ToolAllowed(msgspec.Struct, forbid_unknown_fields=True):
    """A named tool where nothing else may stand: msgspec asks for a tag only where it tells kinds apart."""

    type: Literal["function"]
    function: FunctionNamed


class Allowance(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolAllowed], Meta(min_length=1, max_length=128)]


class AllowedTools(msgspec.Struct, tag="allowed_tools", forbid_unknown_fields=True):
    """The model is told of these of `tools`, and of no others."""

    allowed_tools: Allowance


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class FunctionCalled(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text."""


class ToolCallMade(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: FunctionCalled
