"""`/v1/responses`: create, stream, retrieve, cancel, delete; and their input items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from django.http import HttpResponse, StreamingHttpResponse

from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.response_shape import ResponseShape, framed, new_response
from inference.api.sse import Framing, events_of
from inference.database_thread import database_thread
from inference.errors import ApiError, Conflict, GenerationFailed, InvalidRequest, NotFound
from inference.runtime import Runtime
from inference.schemas.queries import ItemsQuery, ResponseQuery
from inference.schemas.response_answers import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from inference.schemas.responses import InputTokensRequest, ResponseRequest
from inference.services.chat import start_chat
from inference.services.fan_in import chunks_of
from inference.services.generation import Generation
from inference.services.prepare import tokenise_chat
from inference.services.responses import Kept, delete_response, find_response, keep_response
from inference.services.resume import find_request, resume
from inference.services.tiering import in_asked_tier, told_tier
from inference.tool_calls import ToolFormat, tool_format
from tenants.principal import Principal, Scope

_PATIENCE_S: Final = 10.0
_CANCEL_WAIT_S: Final = 15.0


@endpoint(
    "POST",
    scope=Scope.INFERENCE,
    body=ResponseRequest,
    answer=ResponseObject,
    events=(ResponseEvent,),
    headers=(
        "Idempotency-Key",
        "x-weir-deadline-s",
    ),
    generates=True,
)
async def _create(call: ApiCall) -> HttpResponse | StreamingHttpResponse:
    """Answers text or items; whole, streamed, or in the background."""
    body = call.read(ResponseRequest)
    body.check()
    own_tier = call.principal.tier
    call.principal = await in_asked_tier(call.principal, service_tier=body.service_tier)
    own = body.items()
    items = [*await _history(call, body.previous_response_id), *own]
    response_id = call.new_request_id("resp")
    chat = await start_chat(
        call.runtime,
        call.principal,
        body.to_chat(items),
        endpoint="responses",
        request_id=response_id,
        is_streamed=bool(body.stream),
        max_tokens_param="max_output_tokens",
        may_exist=call.may_exist,
    )
    generation = chat.generation
    response = new_response(body, response_id, chat.model)
    response.service_tier = told_tier(body.service_tier, own=own_tier, served=call.principal.tier)
    shape = ResponseShape(response, chat.tool_form)
    kept = Kept(call.principal.tenant_id, generation.ticket.model, items, len(own), response, False)
    if body.background:
        try:
            await keep_response(kept)
        except BaseException:
            generation.leave()
            raise
        queued = call.respond(response, headers=generation.headers())
        call.runtime.spawn(_follow_to_end(generation, shape, kept), name="background-response")
        return queued
    if body.stream:
        streamed = _streamed(generation, shape, kept, breaks_off=not call.may_exist)
        return await call.stream(streamed, headers=generation.headers)
    async with generation:
        await _follow(generation, shape, breaks_off=not call.may_exist)
    if response.store:
        await keep_response(_ended(kept))
    return call.respond(response, headers=generation.headers())


@endpoint("POST", scope=Scope.INFERENCE, body=InputTokensRequest, answer=InputTokens, errors=(404,))
async def count_input_tokens(call: ApiCall) -> HttpResponse:
    """How many tokens a response's input has; costs nothing."""
    body = call.read(InputTokensRequest)
    body.check()
    chat = body.to_chat([*await _history(call, body.previous_response_id), *body.items()])
    models = call.runtime.models
    model = await models.get(chat.model, tenant_public_id=call.principal.tenant_public_id, kind="generate")
    prompt = await tokenise_chat(models, model, chat.messages, None, chat.active_tools())
    return call.respond(InputTokens(len(prompt)))


@endpoint("GET", scope=Scope.INFERENCE, query=ResponseQuery, answer=ResponseObject, errors=(404,))
async def _retrieve(call: ApiCall, *, response_id: str) -> HttpResponse:
    """A stored response, as it stands."""
    if call.query(ResponseQuery).stream:
        raise InvalidRequest(
            "A stored response can't be streamed: leave 'stream' out.",
            param="stream",
            code="unsupported_parameter",
        )
    kept = await _up_to_date(call, await find_response(call.principal, response_id))
    return call.respond(kept.response)


@endpoint("DELETE", scope=Scope.INFERENCE, answer=ResponseDeleted, errors=(404,))
async def _delete(call: ApiCall, *, response_id: str) -> HttpResponse:
    """Forgets it; where it still runs, ends it."""
    kept = await find_response(call.principal, response_id)
    if not kept.is_final:
        await call.runtime.broker.cancel(kept.model, response_id)
    await delete_response(call.principal, response_id)
    return call.respond(ResponseDeleted(response_id))


@endpoint("POST", scope=Scope.INFERENCE, answer=ResponseObject, errors=(404,))
async def cancel_response(call: ApiCall, *, response_id: str) -> HttpResponse:
    """Ends a background response."""
    kept = await find_response(call.principal, response_id)
    if not kept.response.background:
        raise InvalidRequest(
            "Only a background response can be cancelled: close the connection of others, or use "
            "POST /v1/requests/{id}/cancel.",
            param="response_id",
        )
    if not kept.is_final:
        await call.runtime.broker.cancel(kept.model, response_id)
        kept = await _read_to_end(call, kept, timeout_s=_CANCEL_WAIT_S)
    return call.respond(kept.response)


@endpoint("GET", scope=Scope.INFERENCE, query=ItemsQuery, answer=ItemList, errors=(404,))
async def list_input_items(call: ApiCall, *, response_id: str) -> HttpResponse:
    """What a response answered."""
    asked = call.query(ItemsQuery)
    kept = await find_response(call.principal, response_id)
    own = kept.items[len(kept.items) - kept.num_own_items :]
    shown = [_shown(item, f"{response_id}_in_{index}") for index, item in enumerate(own)]
    if asked.order == "desc":
        shown.reverse()
    ids = [item["id"] for item in shown]
    start = ids.index(asked.after) + 1 if asked.after in ids else 0
    page = shown[start : start + asked.limit]
    return call.respond(
        ItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=start + len(page) < len(shown),
        )
    )


responses = by_method(POST=_create)
response = by_method(GET=_retrieve, DELETE=_delete)


async def _history(call: ApiCall, previous: str | None) -> list[dict[str, Any]]:
    if previous is None:
        return []
    try:
        kept = await _up_to_date(call, await find_response(call.principal, previous))
    except NotFound as error:
        raise InvalidRequest(
            f"Previous response '{previous[:80]}' not found: it was not stored, was deleted, or is too old. Send the "
            "conversation so far as 'input', and leave 'store' on for what you will continue.",
            code="previous_response_not_found",
            param="previous_response_id",
        ) from error
    if not kept.is_final:
        raise Conflict(
            "The previous response has not ended yet. Wait until its 'status' says so, or cancel it.",
            code="response_not_ended",
            param="previous_response_id",
        )
    return kept.conversation()


async def _follow(generation: Generation, shape: ResponseShape, *, breaks_off: bool = False) -> None:
    """To the end, a bad one included. Raises ApiError then."""
    async for item in chunks_of([generation], keep_alive_s=_PATIENCE_S, breaks_off=breaks_off):
        if item is not None:
            shape.events(item[1])
    if (failure := generation.failure()) is not None:
        raise failure
    assert generation.finish is not None
    shape.last_event(generation.finish)


@database_thread()
async def _follow_to_end(generation: Generation, shape: ResponseShape, kept: Kept) -> None:
    """Nobody waits at a connection. A gateway that dies here leaves the rest to who asks for the answer."""
    try:
        await _follow(generation, shape)
    except ApiError as error:
        shape.failed(error)
    await keep_response(_ended(kept))


async def _streamed(
    generation: Generation, shape: ResponseShape, kept: Kept, *, breaks_off: bool
) -> AsyncGenerator[bytes, None]:
    """The events; the response is kept before the client hears of its end, and may go on from it."""

    def last() -> list[Any]:
        assert generation.finish is not None
        return [shape.last_event(generation.finish)]

    events = events_of(
        [generation],
        begin=shape.first_events,
        render=lambda _, chunk: shape.events(chunk),
        close=last,
        breaks_off=breaks_off,
        framing=Framing(event=framed, error=lambda error: framed(shape.failed(error)), done=b""),
    )
    async with aclosing(events):
        async for told in events:
            if shape.is_final and kept.response.store:
                await keep_response(_ended(kept))
            yield told


async def _up_to_date(call: ApiCall, kept: Kept) -> Kept:
    """A background response as it stands now."""
    if kept.is_final:
        return kept
    try:
        _, state = await find_request(call.runtime, call.principal, kept.response.id, model=kept.model)
    except NotFound:
        state = None
    if state is not None and state.finish is None and state.state in ("queued", "running"):
        kept.response.status = "queued" if state.state == "queued" else "in_progress"
        return kept
    return await _read_to_end(call, kept)


async def _read_to_end(call: ApiCall, kept: Kept, *, timeout_s: float = 10.0) -> Kept:
    """From the token log: whichever gateway began it need not be there any more."""
    shape = ResponseShape(kept.response, await _tool_form(call.runtime, call.principal, kept))
    try:
        async with asyncio.timeout(timeout_s):
            generation = await resume(call.runtime, call.principal, kept.response.id, model=kept.model)
            await _follow(generation, shape)
    except TimeoutError:
        return kept
    except NotFound:
        lost = GenerationFailed("The answer was lost before it was stored. Ask again.", code="response_lost")
        shape.failed(lost)
    except ApiError as error:
        shape.failed(error)
    ended = _ended(kept)
    await keep_response(ended)
    return ended


async def _tool_form(runtime: Runtime, principal: Principal, kept: Kept) -> ToolFormat | None:
    if not kept.response.tools or kept.response.tool_choice == "none":
        return None
    model = await runtime.models.get(kept.response.model, tenant_public_id=principal.tenant_public_id)
    return tool_format(model.card.chat_template)


def _ended(kept: Kept) -> Kept:
    return Kept(kept.tenant_id, kept.model, kept.items, kept.num_own_items, kept.response, True)


def _shown(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An input item as clients list it: with an id, and with content in parts."""
    shown = {"id": item_id, **{key: value for key, value in item.items() if value is not None}}
    if shown["type"] == "message" and isinstance(shown["content"], str):
        kind = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown
