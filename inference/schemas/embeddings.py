"""`POST /v1/embeddings`: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from inference.errors import InvalidRequest
from inference.schemas.prompts import Prompts, prompts_of

TEXTS_MAX: Final = 2048
"""As in OpenAI's specification."""


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    # Accepted; it changes nothing in the answer.
    user: str | None = None

    def texts(self) -> list[str | list[int]]:
        """One entry per vector, in order. Raises InvalidRequest."""
        texts = prompts_of(self.input, param="input", at_most=TEXTS_MAX)
        for index, text in enumerate(texts):
            if not text:
                raise InvalidRequest(f"Entry {index} of 'input' is empty: leave it out.", param="input")
        return texts


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or their little-endian float32 in base64."""
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
