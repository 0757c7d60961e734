"""`/v1/requests/{id}`: where a request stands; `.../cancel`; `.../stream`: its answer from where a connection broke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from asgiref.sync import sync_to_async
from django.http import HttpResponse, StreamingHttpResponse

from engine_worker.broker import RequestState
from engine_worker.protocol import Chunk
from inference.api.chat_completions import ChatShape
from inference.api.completions import TextShape
from inference.api.endpoint import ApiCall, endpoint
from inference.api.sse import Position, events_of
from inference.errors import Conflict, InvalidRequest, NotFound
from inference.models_served import ServedModel
from inference.schemas.answers import ChatCompletionChunk, Completion
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.completions import CompletionRequest
from inference.schemas.explain import RequestExplanation, explanation_object
from inference.schemas.queries import StreamQuery
from inference.schemas.sampling import StreamOptions
from inference.services.completions import Prompted
from inference.services.explain import NothingToExplain, explain
from inference.services.generation import Generation
from inference.services.resume import find_request, resume
from inference.services.tiering import told_again
from tenants.principal import Scope


class RequestStatus(msgspec.Struct, kw_only=True):
    id: str
    model: str
    status: str
    """`queued`, `running`, `finished`, or `dead`: given up after its last attempt, with an error."""
    position: int | None
    """About how many requests go first; null unless queued."""
    attempts: int
    completion_tokens: int
    finish_reason: str | None
    error_code: str | None
    """Of one that failed: as its client was told, `model_unavailable` say."""
    queue_ms: int
    """How long it has waited in the queue, or had waited when a worker took it or it ended without one."""
    object: str = "request"


@endpoint("GET", scope=Scope.INFERENCE, answer=RequestStatus, errors=(404,))
async def retrieve_request(call: ApiCall, request_id: str) -> HttpResponse:
    """Where a request stands, also in the queue."""
    return call.respond(_status(request_id, *await find_request(call.runtime, call.principal, request_id)))


@endpoint("POST", scope=Scope.INFERENCE, answer=RequestStatus, errors=(404,))
async def cancel_request(call: ApiCall, request_id: str) -> HttpResponse:
    """Ends a request: one that waits at once, one that runs with its worker's next step. What has ended stays so."""
    if request_id.startswith("batch-"):
        raise Conflict(
            "This request is a line of a batch: cancel the batch.",
            code="request_of_batch",
            param="request_id",
        )
    model, _ = await find_request(call.runtime, call.principal, request_id)
    await call.runtime.broker.cancel(model, request_id)
    state = await find_request(call.runtime, call.principal, request_id, model=model)
    return call.respond(_status(request_id, *state))


def _status(request_id: str, model: str, state: RequestState) -> RequestStatus:
    return RequestStatus(
        id=request_id,
        model=model,
        status=state.state,
        position=state.position,
        attempts=state.attempts,
        completion_tokens=state.tokens,
        finish_reason=state.finish.reason if state.finish else None,
        error_code=state.finish.error.code if state.finish and state.finish.error else None,
        queue_ms=state.queued_ms,
    )


@endpoint("GET", scope=Scope.USAGE_READ, answer=RequestExplanation, errors=(404,))
async def explain_request(call: ApiCall, request_id: str) -> HttpResponse:
    """Every level, number and price that decided about it."""
    principal = call.principal
    try:
        explained = await sync_to_async(explain)(
            principal.tenant_id, principal.tenant_public_id, request_id.replace("\0", "")[:128]
        )
    except NothingToExplain:
        raise NotFound(
            "There is no such request, or it was refused too long ago. Give the answer's own id, or the x-weir-request "
            "of a refusal.",
            code="request_not_found",
            param="request_id",
        ) from None
    return call.respond(explanation_object(explained))


@endpoint(
    "GET",
    scope=Scope.INFERENCE,
    query=StreamQuery,
    events=(ChatCompletionChunk, Completion),
    headers=("Last-Event-ID", "x-weir-resume-grace"),
    errors=(404,),
)
async def resume_stream(call: ApiCall, request_id: str) -> StreamingHttpResponse:
    """An answer's events from where a connection broke off."""
    asked = call.query(StreamQuery)
    read_to = _position(call, asked)
    model_name, state = await find_request(call.runtime, call.principal, request_id)
    if read_to is not None and state.finish is not None and read_to.next_seq > state.tokens:
        raise _beyond_the_end(read_to, state.tokens)
    model = await call.runtime.models.get(model_name, kind="generate")
    # Where each token stands in the text only the whole text tells.
    from_seq = 0 if read_to is None or asked.logprobs else read_to.next_seq
    generation = await resume(call.runtime, call.principal, request_id, model=model_name, from_seq=from_seq)
    tier = await told_again(state.tier_rank, own=call.principal.tier)
    shape = _shape(asked, generation, model, tier)

    def render(index: int, chunk: Chunk) -> Sequence[Any]:
        # Not before its end: a queue that lost its last second makes the same tokens again.
        end = chunk.finish
        if end is not None and read_to is not None and read_to.next_seq > end.completion_tokens:
            raise _beyond_the_end(read_to, end.completion_tokens)
        return shape.events(index, chunk)

    return await call.stream(
        events_of(
            [generation],
            render=render,
            close=shape.last_events,
            can_resume=True,
            after=read_to,
            grace_s=call.resume_grace_s(),
        ),
        headers=generation.headers,
    )


def _position(call: ApiCall, asked: StreamQuery) -> Position | None:
    text = call.request.headers.get("Last-Event-ID", "") or asked.last_event_id or ""
    try:
        return Position.parse(text) if text else None
    except ValueError as error:
        raise InvalidRequest(
            f"Last-Event-ID is '{text[:40]}': give the id of the last event that you read, such as '12'.",
            param="Last-Event-ID",
        ) from error


def _beyond_the_end(read_to: Position, tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"Last-Event-ID is '{read_to}', but the answer ends after token {tokens}: give the id of the last event that "
        "you read.",
        param="Last-Event-ID",
    )


def _shape(
    asked: StreamQuery, generation: Generation, model: ServedModel, tier: str
) -> ChatShape | TextShape:
    """In the words of the route that the request came by, as its id says."""
    wants = StreamOptions(include_usage=asked.include_usage)
    request_id = generation.ticket.request_id
    if request_id.startswith("cmpl-"):
        text = CompletionRequest(
            model=model.card.model,
            prompt=[0],
            stream=True,
            stream_options=wants,
            logprobs=0 if asked.logprobs else None,
        )
        return TextShape(request_id, text, Prompted(model, [[0]], [""], [generation]))
    chat = ChatCompletionRequest(
        model=model.card.model, messages=[], stream=True, stream_options=wants, logprobs=asked.logprobs
    )
    return ChatShape(generation, chat, model, None, tier)
