"""Requests with an `Idempotency-Key`: they go on without their client, and are answered once for all who ask."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

import structlog
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse

from inference.api.sse import tells_failure
from inference.database_thread import database_thread
from inference.errors import InvalidRequest
from inference.runtime import Runtime
from inference.services.idempotency import (
    Claim,
    RefusedBefore,
    claim_request,
    forget_claim,
    keep_answer,
)
from tenants.principal import Principal

log = structlog.get_logger(__name__)

Answer: TypeAlias = HttpResponse | StreamingHttpResponse
_KEY: Final = re.compile(r"[!-~]{1,255}")


async def answer_once(
    request: HttpRequest,
    principal: Principal,
    runtime: Runtime,
    key: str,
    work: Callable[[Claim], Awaitable[Answer]],
) -> Answer:
    """The answer of `work`, which is given the claim; or the one that it gave before. Raises ApiError."""
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 visible ASCII characters.", param="Idempotency-Key"
        )
    asked = request.path.encode() + b"\n" + request.body
    claim = await claim_request(principal, key, asked)
    if claim.content_type:
        return _replay(claim)

    def anew() -> Awaitable[Claim]:
        return claim_request(principal, key, asked)

    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    runtime.spawn(_answer(claim, anew, work, answered), name="idempotent-request")
    return await asyncio.shield(answered)


def _replay(claim: Claim) -> HttpResponse:
    replay = HttpResponse(claim.body, content_type=claim.content_type)
    replay.headers["x-weir-replayed"] = "true"
    return replay


@database_thread()
async def _answer(
    claim: Claim,
    anew: Callable[[], Awaitable[Claim]],
    work: Callable[[Claim], Awaitable[Answer]],
    answered: asyncio.Future[Answer],
) -> None:
    """Whether the client stays or not: it will come back with the same key."""
    try:
        try:
            answer = await work(claim)
        except RefusedBefore:
            await forget_claim(claim)
            claim = await anew()
            answer = _replay(claim) if claim.content_type else await work(claim)
        content_type = answer.headers["Content-Type"]
        if isinstance(answer, StreamingHttpResponse):
            record = _Record()
            told = StreamingHttpResponse(record.read())
            told.headers = answer.headers
            answered.set_result(told)
            try:
                async for event in answer:
                    record.add(event)
                body = b"".join(event for event in record.events if not event.startswith(b":"))
                if any(map(tells_failure, record.events)):
                    await _forgotten(claim)
                else:
                    await _kept(claim, content_type, body)
            finally:
                record.end()  # who has read to the end may ask again at once, and gets this
        else:
            await _kept(claim, content_type, answer.content)
            answered.set_result(answer)
    except Exception as error:
        if not claim.is_repeat or getattr(error, "is_end", False):
            await _forgotten(claim)
        if answered.done():
            log.exception("idempotent_request_failed")
            return
        answered.set_exception(error)
        answered.exception()  # whoever waits sees it; the client may have left
    finally:
        if not answered.done():
            answered.cancel()


async def _forgotten(claim: Claim) -> None:
    """What it failed with is told even so."""
    try:
        await forget_claim(claim)
    except (DatabaseError, InterfaceError):
        # Whoever repeats it finds that nothing runs, and it is begun.
        log.warning("idempotency_key_not_forgotten")


async def _kept(claim: Claim, content_type: str, body: bytes) -> None:
    try:
        await keep_answer(claim, content_type=content_type, body=body)
    except (DatabaseError, InterfaceError):
        log.warning("idempotent_answer_not_kept")  # whoever repeats it finds the token log, for ten minutes


class _Record:
    """A stream's events as they come, for a reader that may lag behind or leave."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._has_ended = False
        self._more = asyncio.Event()

    def add(self, event: bytes) -> None:
        self.events.append(event)
        self._more.set()

    def end(self) -> None:
        self._has_ended = True
        self._more.set()

    async def read(self) -> AsyncIterator[bytes]:
        next_event = 0
        while True:
            while next_event < len(self.events):
                next_event += 1
                yield self.events[next_event - 1]
            if self._has_ended:
                return
            self._more.clear()
            await self._more.wait()
