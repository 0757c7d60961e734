"""`/ws/chat`: the console's chat, by the same path as the API.

Tokens come over the process's live channel and not over the channel layer, which drops when it is full.
A connection that drops leaves its generations running for a while, to be resumed on any gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import Any, Final

import msgspec
import structlog
from asgiref.sync import sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError, InterfaceError
from django.utils import timezone

from engine_worker.broker import BrokerUnavailable
from engine_worker.protocol import Finish, charged_prompt_tokens
from inference.errors import ApiError, GenerationFailed, InvalidRequest, NotAllowed, NotFound
from inference.outages import outage
from inference.pace import Pace
from inference.runtime import get_runtime
from inference.schemas import chat_socket as frames
from inference.schemas.reading import read_json_frame
from inference.services.generation import Generation
from inference.services.prepare import make_grammar, tokenise_chat
from inference.services.resume import resume
from inference.services.submission import Submission, new_request_id
from inference.services.submit import submit
from tenants.auth import AuthError, principal_for_member
from tenants.pricing import price_at
from tenants.principal import Principal, Scope
from tenants.principal_selectors import model_prices
from tenants.row_security import bind_tenant

log = structlog.get_logger(__name__)

RESUME_GRACE_S: Final = 20.0
GENERATIONS_MAX: Final = 8
"""At once on one socket."""
_SILENCE_S: Final = 10.0
CLOSE_SIGNED_OUT: Final = 4401
_NOT_FOUND: Final = "generation_not_found"

_encode = msgspec.json.Encoder().encode


class ChatConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types
    # None of that name is configured: a socket of this kind holds no connection to Redis of its own, and
    # does not wait for one to be given up when it closes.
    channel_layer_alias = "none"

    async def connect(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._generations: dict[str, Generation] = {}
        self._stopped_early: set[str] = set()
        await self.accept()
        if not self.scope["user"].is_authenticated:
            await self._error(
                None, NotAllowed("You are signed out. Sign in, then connect again.", code="signed_out")
            )
            await self.close(code=CLOSE_SIGNED_OUT)

    async def disconnect(self, code: int) -> None:
        for generation in self._generations.values():
            generation.detach(RESUME_GRACE_S)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if not self.scope["user"].is_authenticated:
            return
        try:
            if text_data is None:
                raise InvalidRequest("Send JSON in text frames.")
            frame = read_json_frame(text_data.encode(), frames.ClientFrame)
            if isinstance(frame, frames.Stop):
                await self._stop(frame.id)
            else:
                self._begin(frame)
        except ApiError as error:
            await self._refuse(text_data, error)
        except BrokerUnavailable as error:
            await self._refuse(text_data, _told(error))

    def _begin(self, frame: frames.Start | frames.Resume) -> None:
        if frame.id in self._tasks:
            raise InvalidRequest(
                f"A generation with the id '{frame.id}' is running already, and goes on: give each its own.",
                code="generation_id_in_use",
                param="id",
            )
        if len(self._tasks) >= GENERATIONS_MAX:
            raise InvalidRequest(
                f"At most {GENERATIONS_MAX} generations run at once on one connection: wait until one has ended, or "
                "stop one."
            )
        self._tasks[frame.id] = asyncio.create_task(self._run(frame), name=f"chat-{frame.id}")

    async def _stop(self, frame_id: str) -> None:
        if generation := self._generations.get(frame_id):
            await _cancel(generation)
        elif frame_id in self._tasks:
            self._stopped_early.add(frame_id)  # still being prepared
        else:
            raise NotFound(
                f"No generation with the id '{frame_id}' runs on this connection: it has ended, or was begun on "
                "another. Resume it here to stop it.",
                code=_NOT_FOUND,
                param="id",
            )

    async def _run(self, frame: frames.Start | frames.Resume) -> None:
        try:
            pace, from_seq = Pace(), 0
            if isinstance(frame, frames.Start):
                generation = await self._start(frame)
            else:
                generation = await self._resume(frame)
                pace, from_seq = Pace(is_resumed=True), frame.from_seq
            self._generations[frame.id] = generation
            if frame.id in self._stopped_early:
                await _cancel(generation)
            await self._relay(frame.id, generation, pace, from_seq)
        except ApiError as error:
            await self._error(frame.id, error)
        except Exception as error:
            await self._error(frame.id, _told(error))
        finally:
            self._generations.pop(frame.id, None)
            self._tasks.pop(frame.id, None)
            self._stopped_early.discard(frame.id)

    async def _start(self, frame: frames.Start) -> Generation:
        runtime = get_runtime()
        principal = await self._principal(frame.tenant, frame.tier)
        model = await runtime.models.get(
            frame.model, tenant_public_id=principal.tenant_public_id, kind="generate"
        )
        for index, message in enumerate(frame.messages):
            if message.content is None:
                raise InvalidRequest(
                    f"messages[{index}] has no 'content': give a text.", param=f"messages[{index}].content"
                )
        prompt = await tokenise_chat(runtime.models, model, frame.messages, None)
        generation = await submit(
            runtime,
            principal,
            Submission(
                model=model,
                prompt_token_ids=prompt,
                fields=frame.params,
                requested_tokens=frame.params.max_tokens,
                max_tokens_param="max_tokens",
                endpoint="ws.chat",
                grammar=await make_grammar(runtime.models, frame.params),
                request_id=new_request_id("wschat"),
            ),
        )
        self._generations[frame.id] = generation
        await self._send(
            frames.Started(
                id=frame.id,
                request_id=generation.ticket.request_id,
                model=model.card.model,
                prompt_tokens=len(prompt),
            )
        )
        return generation

    async def _resume(self, frame: frames.Resume) -> Generation:
        runtime = get_runtime()
        principal = await self._principal(frame.tenant)
        served = await runtime.models.get(frame.model, tenant_public_id=principal.tenant_public_id)
        generation = await resume(
            runtime, principal, frame.request_id, model=served.card.model, from_seq=frame.from_seq
        )
        self._generations[frame.id] = generation
        await self._send(frames.Started(id=frame.id, request_id=frame.request_id, model=served.card.model))
        return generation

    async def _relay(self, frame_id: str, generation: Generation, pace: Pace, from_seq: int) -> None:
        began_at = timezone.now()
        while generation.finish is None:
            chunk = await generation.next(_SILENCE_S)
            if chunk is None:
                continue
            pace.saw(len(chunk.token_ids))
            if chunk.token_ids or chunk.text:
                await self._send(
                    frames.Delta(id=frame_id, seq=chunk.seq, text=chunk.text, tokens=len(chunk.token_ids))
                )
        finish = generation.finish
        if from_seq > finish.completion_tokens:
            raise InvalidRequest(
                f"from_seq is {from_seq}, but the answer ends after token {finish.completion_tokens}: give the last "
                "delta's 'seq' and 'tokens' together.",
                param="from_seq",
            )
        await self._send(
            frames.UsageFrame(
                id=frame_id,
                prompt_tokens=finish.prompt_tokens,
                completion_tokens=finish.completion_tokens,
                tokens_per_second=pace.tokens_per_second,
                ttft_ms=pace.ttft_ms,
                cost_microusd=await _cost_microusd(generation.ticket.model, finish, began_at),
            )
        )
        failure = generation.failure()
        # Stopped on request is an end that this client asked for.
        if failure is not None and failure.code != "request_cancelled":
            raise failure
        await self._send(frames.Done(id=frame_id, finish_reason=finish.reason))

    async def _principal(self, tenant: str | None, tier: str | None = None) -> Principal:
        principal = await principal_for_member(self.scope["user"], tenant, tier)
        bind_tenant(principal.tenant_id)
        if Scope.INFERENCE not in principal.scopes:
            raise NotAllowed(
                "Your role does not allow generating. Ask an owner or admin of the tenant for another.",
                code="insufficient_permissions",
            )
        return principal

    async def _send(self, frame: msgspec.Struct) -> None:
        # Some servers refuse to send to who has left, before they tell of it: `disconnect` comes next, and ends all.
        with contextlib.suppress(OSError):
            await self.send(text_data=_encode(frame).decode())

    async def _refuse(self, text: str | None, error: ApiError) -> None:
        """A frame, and not the generation whose id it has, if that runs or there is none to be stopped."""
        named = _id_in(text)
        if named in self._tasks or error.code == _NOT_FOUND:
            await self._send(
                frames.ErrorFrame(
                    id=None, refused_id=named, error=error.body(), retry_after_ms=error.retry_after_ms
                )
            )
        else:
            await self._error(named, error)

    async def _error(self, frame_id: str | None, error: ApiError) -> None:
        await self._send(
            frames.ErrorFrame(id=frame_id, error=error.body(), retry_after_ms=error.retry_after_ms)
        )


async def _cancel(generation: Generation) -> None:
    await get_runtime().broker.cancel(generation.ticket.model, generation.ticket.request_id)


async def _cost_microusd(model: str, finish: Finish, began_at: datetime) -> int | None:
    """What the ledger will say, as long as the price does not change in mid-answer."""
    try:
        price = price_at((await sync_to_async(model_prices)({model})).get(model, []), began_at)
    except (DatabaseError, InterfaceError):
        return None  # the answer is worth more than its figure
    if price is None:
        return None
    prompt_tokens = charged_prompt_tokens(
        finish_reason=finish.reason,
        prompt_tokens=finish.prompt_tokens,
        completion_tokens=finish.completion_tokens,
    )
    return price.cost_microusd(
        prompt_tokens=prompt_tokens,
        cached_tokens=min(finish.cached_tokens, prompt_tokens),
        completion_tokens=finish.completion_tokens,
    )


def _told(error: Exception) -> ApiError:
    if (away := outage(error)) is not None:
        return away
    if isinstance(error, AuthError):
        return NotAllowed(str(error), code=error.code)
    log.error("chat_failed", exc_info=error)
    return GenerationFailed(
        "The server had an error. Try again; where that does not help, tell the operator when it was.",
        code="internal_error",
    )


def _id_in(text: str | None) -> str | None:
    """The generation that a bad frame meant, if it says so."""
    try:
        data: Any = msgspec.json.decode(text or "")
    except (msgspec.DecodeError, RecursionError):
        return None
    named = data.get("id") if isinstance(data, dict) else None
    return named if isinstance(named, str) and len(named) <= 64 else None
