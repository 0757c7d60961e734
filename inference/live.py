"""`/ws/live`: a part of a page, sent anew whenever it looks different, while somebody sees it.

The page closes the socket when its tab is hidden. Each look is a full one: who may no longer see the part is
told so within one interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import parse_qs
from uuid import UUID

import structlog
from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError
from django.http import Http404
from django.template.loader import render_to_string

from engine_worker.broker import BrokerUnavailable
from inference.batch_list import batches_context
from inference.operator_api import read_live_state
from inference.operator_views import live_context
from inference.schemas.operator import LiveState
from inference.services.recall import recall_from_ledger
from tenants.console import console_of
from tenants.models import User
from tenants.quotas.gauges import limit_gauges
from tenants.row_security import bind_operator

log = structlog.get_logger(__name__)

EVERY_S: Final = 2.0
CLOSE_GONE: Final = 4404
"""There is no such part, or it is not for this person."""
PartOf = Callable[[User, Any, str], Awaitable[str]]


async def _limits(user: User, session: Any, tenant: str) -> str:
    return await _rendered(_limits_now, user, session, tenant)


def _limits_now(user: User, session: Any, tenant: str) -> str:
    console = console_of(user, session, UUID(tenant))
    context = {"limits": limit_gauges(console.principal(), console.tenant, recall_from_ledger)}
    return render_to_string("inference/gauges.html", context)


async def _batches(user: User, session: Any, tenant: str) -> str:
    return await _rendered(_batches_now, user, session, tenant)


def _batches_now(user: User, session: Any, tenant: str) -> str:
    console = console_of(user, session, UUID(tenant))
    return render_to_string("inference/batches_part.html", batches_context(console))


async def _fleet(user: User, session: Any, tenant: str) -> str:
    if not user.is_staff:
        raise PermissionDenied
    state = None
    with suppress(BrokerUnavailable):  # the part says so
        state = await read_live_state()
    return await _rendered(_fleet_now, user, state)


def _fleet_now(user: User, state: LiveState | None) -> str:
    bind_operator()
    return render_to_string("admin/live_part.html", live_context(user, state))


async def _rendered(work: Callable[..., str], *args: Any) -> str:
    # Not in the one thread that pages share: watchers must not hold them up.
    text: str = await database_sync_to_async(work, thread_sensitive=False)(*args)
    return text


PARTS: Final[Mapping[str, PartOf]] = {"limits": _limits, "batches": _batches, "fleet": _fleet}


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types
    """Text frames: the part's HTML, or a space where it has not changed, which says that the figures are fresh."""

    # None of that name is configured: it needs no channel layer (see ChatConsumer).
    channel_layer_alias = "none"

    async def connect(self) -> None:
        self._task: asyncio.Task[None] | None = None
        asked = parse_qs(self.scope["query_string"].decode("latin-1"))
        part = PARTS.get(asked.get("part", [""])[0])
        await self.accept()
        if part is None:
            await self.close(code=CLOSE_GONE)
            return
        self._task = asyncio.create_task(self._run(part, asked.get("tenant", [""])[0]), name="live-part")

    async def disconnect(self, code: int) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Nothing is asked of it but to be there."""

    async def _run(self, part: PartOf, tenant: str) -> None:
        sent: str | None = None
        while True:
            try:
                html = await part(await self._person(), self.scope["session"], tenant)
            except (PermissionDenied, Http404, ValueError):
                await self.close(code=CLOSE_GONE)
                return
            except (DatabaseError, InterfaceError) as error:
                log.warning("live_part_unavailable", error=str(error))
                await self.close(code=1013)  # try again later
                return
            await self.send(text_data=" " if html == sent else html)
            sent = html
            await asyncio.sleep(EVERY_S)

    async def _person(self) -> User:
        """Read anew each time: who signed out, or was switched off, sees nothing more."""
        session = self.scope["session"]
        if not session.session_key or not await session.aexists(session.session_key):
            raise PermissionDenied
        user = await get_user(self.scope)
        if not isinstance(user, User) or not user.is_active:
            raise PermissionDenied
        return user
