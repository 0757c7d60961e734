"""`POST /v1/embeddings`: a vector per text; the texts of one call are one request and one row in the ledger."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.schemas.embeddings import EmbeddingList, EmbeddingRequest
from inference.services.collect import last_chunk
from inference.services.embeddings import start_embedding
from tenants.principal import Scope


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=EmbeddingRequest,
    answer=EmbeddingList,
    headers=("Idempotency-Key", "x-weir-deadline-s"),
    generates=True,
)
async def embeddings(call: ApiCall) -> HttpResponse:
    """A vector for each text."""
    embedded = await start_embedding(
        call.runtime,
        call.principal,
        call.read(EmbeddingRequest),
        endpoint="embeddings",
        request_id=call.new_request_id("embd"),
        may_exist=call.may_exist,
    )
    chunk = await last_chunk(embedded.generation)
    return await call.respond_off_loop(
        lambda: _in_parts(embedded.answer(chunk)),
        size=embedded.num_texts * embedded.model.card.dimensions,
        headers=embedded.generation.headers(),
    )


def _in_parts(answer: EmbeddingList) -> dict[str, Any]:
    """The same, vector by vector: between two of them other threads have a turn."""
    parts = [msgspec.Raw(msgspec.json.encode(vector)) for vector in answer.data]
    return {"object": answer.object, "data": parts, "model": answer.model, "usage": answer.usage}
