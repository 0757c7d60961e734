"""The two shapes of an error's body, for the OpenAPI document; api/error_shapes.py renders them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    """The first four, always."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str
    retry_after: int | msgspec.UnsetType = msgspec.UNSET
    """Seconds, as the header Retry-After has them; also where the error is an event of a stream."""


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    code: str
    """Ours: Anthropic's types tell less apart."""
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Where its SDKs look for more."""
    retry_after: int | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorAnswer(msgspec.Struct):
    error: AnthropicErrorDetail
    request_id: str | None
    type: Literal["error"] = "error"
