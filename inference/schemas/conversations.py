"""What the chat page saves."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

TITLE_MAX = 120
_Title = Annotated[str, Meta(min_length=1, max_length=TITLE_MAX)]
_Text = Annotated[str, Meta(max_length=1_000_000)]
_Name = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: _Count
    completion_tokens: _Count
    tokens_per_second: float | None = None
    ttft_ms: _Count | None = None
    cost_microusd: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class Failure(msgspec.Struct, kw_only=True):
    message: Annotated[str, Meta(max_length=2000)] = ""
    code: Annotated[str, Meta(max_length=64)] | None = None


class Answer(msgspec.Struct, kw_only=True):
    """What generation.js keeps of an answer; other fields are dropped."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    model: _Name
    requestId: Annotated[str, Meta(max_length=128)] | None = None
    nextSeq: _Count = 0
    phase: Annotated[str, Meta(pattern="^(asked|running|finished)$")] = "asked"
    text: _Text = ""
    tail: bool = False
    tier: _Name = ""
    finishReason: Annotated[str, Meta(max_length=32)] | None = None
    usage: Usage | None = None
    error: Failure | None = None


class Settings(msgspec.Struct, kw_only=True):
    """What is set beside the chat (templates/static/weir/chat/settings.js); other fields are dropped."""

    model: _Name = ""
    tier: _Name = ""
    other: _Name = ""
    """The model whose answers stand beside the first's."""
    system: _Text = ""
    params: Annotated[dict[Annotated[str, Meta(max_length=32)], int | float], Meta(max_length=16)] = {}
    """Sampling, as the API names it."""


class SaveExchange(msgspec.Struct, kw_only=True):
    question: Annotated[str, Meta(min_length=1, max_length=1_000_000)]
    answer: Answer
    parent: UUID | None = None
    pair: UUID | None = None
    leaf: UUID | None = None
    """The end of the branch that is looked at; this exchange where none is named."""
    title: _Title = "New chat"
    """Of the conversation, where this is its first exchange."""
    settings: Settings | None = None
    """The conversation's from now on; None leaves them."""


class ChangeConversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    title: _Title | UnsetType = UNSET
    leaf: UUID | UnsetType = UNSET
    settings: Settings | UnsetType = UNSET


def without_nul(value: Any) -> Any:
    """PostgreSQL's text holds every character but this one, which a model may well make."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {key: without_nul(item) for key, item in value.items()}
    return value
