"""`POST /v1/embeddings`: a vector per text; the texts of one call are one request and one row in the ledger."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from typing import Final

from django.http import HttpResponse

from engine_worker.protocol import Chunk
from inference.api.endpoint import ApiCall, endpoint
from inference.errors import GenerationFailed, InvalidRequest
from inference.models_served import ServedModel
from inference.schemas.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from inference.schemas.sampling import SamplingFields
from inference.services.collect import last_chunk
from inference.services.idempotency import submit_once
from inference.services.prepare import tokenise_texts
from inference.services.refusal import bucket_headers
from inference.services.submit import Submission
from tenants.principal import Scope

_NUMBERS_MAX: Final = 2**20
"""In one answer, which is one message from the worker: 4 MiB and a third."""
_FLOAT_BYTES: Final = 4


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=EmbeddingRequest,
    answer=EmbeddingList,
    headers=(
        "Idempotency-Key",
        "x-weir-deadline-s",
    ),
    generates=True,
)
async def embeddings(call: ApiCall) -> HttpResponse:
    """A vector for each text."""
    body = call.read(EmbeddingRequest)
    texts = body.texts()
    model = await call.runtime.models.get(
        body.model, tenant_public_id=call.principal.tenant_public_id, kind="embedding"
    )
    _refuse_other_sizes(body, model, len(texts))
    ids = await tokenise_texts(call.runtime.models, model, texts)
    generation = await submit_once(
        call.runtime,
        call.principal,
        Submission(
            model=model,
            prompt_token_ids=[token_id for text in ids for token_id in text],
            fields=SamplingFields(),
            requested_tokens=0,
            max_tokens_param="",
            endpoint="embeddings",
            request_id=call.new_request_id("embd"),
            may_exist=call.may_exist,
            text_lengths=[len(text) for text in ids],
        ),
    )
    chunk = await last_chunk(generation)
    answer = _answer(model, chunk, num_texts=len(ids), as_text=body.encoding_format == "base64")
    return call.respond(answer, headers=bucket_headers(generation.buckets))


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
            f"'input' takes at most {_NUMBERS_MAX // dimensions} entries at once for this model, "
            f"not {num_texts}.",
            param="input",
        )


def _answer(model: ServedModel, chunk: Chunk, *, num_texts: int, as_text: bool) -> EmbeddingList:
    numbers = b64decode(chunk.embedding or "")
    size = model.card.dimensions * _FLOAT_BYTES
    if len(numbers) != size * num_texts:
        # A worker of an older version, say: better no vectors than wrong ones.
        raise GenerationFailed("The worker gave another number of vectors.", code="engine_failed")
    vectors = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    assert chunk.finish is not None
    return EmbeddingList(
        data=[
            Embedding(index, b64encode(vector).decode() if as_text else _floats(vector))
            for index, vector in enumerate(vectors)
        ],
        model=model.card.model,
        usage=EmbeddingUsage(chunk.finish.prompt_tokens, chunk.finish.prompt_tokens),
    )


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector))
