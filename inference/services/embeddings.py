"""Texts to vectors: one generation for all of them, and the answer that its only chunk makes."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Final

from engine_worker.protocol import Chunk
from inference.errors import GenerationFailed, InvalidRequest
from inference.models_served import ServedModel
from inference.runtime import Runtime
from inference.schemas.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from inference.schemas.sampling import SamplingFields
from inference.services.generation import Generation
from inference.services.idempotency import submit_once
from inference.services.overload import refuse_early
from inference.services.prepare import tokenise_texts
from inference.services.submission import Submission
from tenants.counting import counted
from tenants.principal import Principal

_NUMBERS_MAX: Final = 2**20
"""In one answer, which is one message from the worker: 4 MiB and a third."""
_FLOAT_BYTES: Final = 4
_PART: Final = 2**18
"""Characters of base64, by fours."""


@dataclass(frozen=True, slots=True)
class Embedded:
    model: ServedModel
    num_texts: int
    generation: Generation
    as_text: bool

    def answer(self, chunk: Chunk) -> EmbeddingList:
        numbers = _bytes(chunk.embedding or "")
        size = self.model.card.dimensions * _FLOAT_BYTES
        if len(numbers) != size * self.num_texts:
            # A worker of an older version, say: better no vectors than wrong ones.
            raise GenerationFailed(
                "The worker gave another number of vectors. Try again; where that does not help, tell the operator the "
                "x-request-id.",
                code="engine_failed",
            )
        vectors = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        assert chunk.finish is not None
        return EmbeddingList(
            data=[
                Embedding(index, b64encode(vector).decode() if self.as_text else _floats(vector))
                for index, vector in enumerate(vectors)
            ],
            model=self.model.card.model,
            usage=EmbeddingUsage(chunk.finish.prompt_tokens, chunk.finish.prompt_tokens),
        )


async def start_embedding(
    runtime: Runtime,
    principal: Principal,
    body: EmbeddingRequest,
    *,
    endpoint: str,
    request_id: str,
    may_exist: bool = False,
) -> Embedded:
    """Raises ApiError: nothing is charged and nothing queued then."""
    texts = body.texts()
    model = await runtime.models.get(
        body.model, tenant_public_id=principal.tenant_public_id, kind="embedding"
    )
    _refuse_other_sizes(body, model, len(texts))
    if not may_exist:
        refuse_early(runtime, principal, model)
    ids = await tokenise_texts(runtime.models, model, texts)
    generation = await submit_once(
        runtime,
        principal,
        Submission(
            model=model,
            prompt_token_ids=[token_id for text in ids for token_id in text],
            fields=SamplingFields(),
            requested_tokens=0,
            max_tokens_param="",
            endpoint=endpoint,
            request_id=request_id,
            is_streamed=False,
            may_exist=may_exist,
            text_lengths=[len(text) for text in ids],
        ),
    )
    return Embedded(model, len(ids), generation, as_text=body.encoding_format == "base64")


def _refuse_other_sizes(body: EmbeddingRequest, model: ServedModel, num_texts: int) -> None:
    dimensions = model.card.dimensions
    if body.dimensions not in (None, dimensions):
        raise InvalidRequest(
            f"'{model.card.model}' gives {dimensions} dimensions and no other number: leave 'dimensions' out.",
            param="dimensions",
            code="unsupported_parameter",
        )
    if num_texts * dimensions > _NUMBERS_MAX:
        raise InvalidRequest(
            f"'input' takes at most {counted(_NUMBERS_MAX // dimensions, 'entry', 'entries')} at once for this model, "
            f"not {num_texts}.",
            param="input",
        )


def _bytes(text: str) -> bytes:
    """Of base64, in parts: between two of them other threads have a turn."""
    return b"".join(b64decode(text[at : at + _PART]) for at in range(0, len(text), _PART))


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector))
