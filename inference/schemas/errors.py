"""The two shapes of an error's body, for the OpenAPI document; api/error_shapes.py renders them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    """All four, always."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    code: str | None
    """Ours: Anthropic's types tell less apart."""
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Where its SDKs look for more."""


class AnthropicErrorAnswer(msgspec.Struct):
    error: AnthropicErrorDetail
    request_id: str | None
    type: Literal["error"] = "error"
