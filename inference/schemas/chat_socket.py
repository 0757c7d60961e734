"""The frames of `/ws/chat`: JSON objects with a `type`. docs/api.md has the same, for people.

The client names each generation with an `id` of its own; several may run on one socket.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from inference.schemas.chat import ChatMessage
from inference.schemas.sampling import SamplingFields

GenerationId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]


class ChatParams(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class Start(msgspec.Struct, tag="start", kw_only=True, forbid_unknown_fields=True):
    id: GenerationId
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    params: ChatParams = msgspec.field(default_factory=ChatParams)
    tier: Annotated[str, Meta(max_length=32)] | None = None
    """One that is no better than the tenant's own, which holds where none is named."""
    tenant: str | None = None


class Stop(msgspec.Struct, tag="stop", kw_only=True, forbid_unknown_fields=True):
    id: GenerationId


class Resume(msgspec.Struct, tag="resume", kw_only=True, forbid_unknown_fields=True):
    id: GenerationId
    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    from_seq: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The last delta's `seq` plus its `tokens`."""
    tenant: str | None = None


ClientFrame: TypeAlias = Start | Stop | Resume


class Started(msgspec.Struct, tag="started", kw_only=True):
    id: str
    request_id: str
    model: str
    prompt_tokens: int | None = None
    """Null when resumed."""


class Delta(msgspec.Struct, tag="delta", kw_only=True):
    id: str
    seq: int
    """Index, from 0, of the first of this delta's tokens in the answer."""
    text: str
    tokens: int


class UsageFrame(msgspec.Struct, tag="usage", kw_only=True):
    id: str
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float | None
    ttft_ms: int | None
    """Null when resumed."""
    cost_microusd: int | None = None
    """Null where the model has no price, or prices can't be read. The ledger's row decides."""


class Done(msgspec.Struct, tag="done", kw_only=True):
    id: str
    finish_reason: str


class ErrorFrame(msgspec.Struct, tag="error", kw_only=True):
    id: str | None
    """The generation that ends with it; null: none does."""
    refused_id: str | None = None
    """What the refused frame named, where no generation ends by that: it goes on, or there is none."""
    error: dict[str, Any]
    retry_after_ms: int | None = None
