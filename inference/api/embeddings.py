"""`POST /v1/embeddings`: a vector per text; the texts of one call are one request and one row in the ledger."""

from __future__ import annotations

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
    answer = embedded.answer(await last_chunk(embedded.generation))
    return call.respond(answer, headers=embedded.generation.headers())
