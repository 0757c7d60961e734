"""What the operator decided for the whole installation, at hand in each gateway, never older than a second.

Where the database can't say, or not soon, what it said last goes on to hold: one moment of waiting a second, not one
a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog
from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError
from structlog.contextvars import clear_contextvars

from inference.database_thread import database_thread
from inference.errors import Overloaded
from inference.models import Maintenance, ModelSetting
from tenants.row_security import EVERYBODY, bound_to

log = structlog.get_logger(__name__)

_FRESH_S: Final = 1.0
_WAIT_S: Final = 0.25
_FIRST_WAIT_S: Final = 2.0
"""A gateway that has just started knows nothing yet that could go on to hold."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Where a request names none; None: the API's own."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


NO_DEFAULTS: Final = Defaults()


@dataclass(frozen=True, slots=True)
class ModelRule:
    target: str
    """The served model; "": it is one itself."""
    tenants: frozenset[str] | None
    """Public ids of those who may use it; None: everybody."""
    context_length: int | None
    defaults: Defaults

    def is_for(self, tenant_public_id: str) -> bool:
        """ "" is nobody in particular, who may look at all of them."""
        return self.tenants is None or not tenant_public_id or tenant_public_id in self.tenants


@dataclass(frozen=True, slots=True)
class Policy:
    rules: Mapping[str, ModelRule] = field(default_factory=dict)
    """By the name that clients use."""
    maintenance: tuple[str, int] | None = None
    """The message, and after how many seconds to try again."""

    def refuse_in_maintenance(self) -> None:
        """Raises Overloaded."""
        if self.maintenance is not None:
            message, retry_after_s = self.maintenance
            raise Overloaded(message, code="maintenance", retry_after_ms=retry_after_s * 1000)

    def is_visible(self, model: str, tenant_public_id: str) -> bool:
        rule = self.rules.get(model)
        return rule is None or rule.is_for(tenant_public_id)

    def may_use(self, model: str, tenant_public_id: str) -> bool:
        """By its own name also where only an alias of it is theirs: answers, and resuming them, name the model."""
        return self.is_visible(model, tenant_public_id) or any(
            self.rules[alias].target == model for alias in self.aliases_for(tenant_public_id)
        )

    def served_name(self, name: str) -> str:
        """Of the model that answers to it."""
        rule = self.rules.get(name)
        return rule.target or name if rule else name

    def aliases_for(self, tenant_public_id: str) -> list[str]:
        return [name for name, rule in self.rules.items() if rule.target and rule.is_for(tenant_public_id)]


def read_policy() -> Policy:
    row = Maintenance.objects.filter(is_on=True).first()
    return Policy(read_rules(), None if row is None else (row.message, row.retry_after_s))


def read_rules() -> dict[str, ModelRule]:
    """A query, and one more where some model is not for everybody."""
    settings = list(ModelSetting.objects.all())
    chosen: dict[int, set[str]] = {}
    if not all(row.is_public for row in settings):
        pairs = ModelSetting.objects.filter(is_public=False).values_list("id", "tenants__public_id")
        with bound_to(EVERYBODY):  # whoever's request it is that found the last reading too old
            for setting_id, tenant in pairs:
                chosen.setdefault(setting_id, set()).add(str(tenant))
    return {
        row.name: ModelRule(
            target=row.target,
            tenants=None if row.is_public else frozenset(chosen.get(row.pk, ())),
            context_length=row.context_length,
            defaults=Defaults(row.temperature, row.top_p, row.max_tokens),
        )
        for row in settings
    }


class SitePolicy:
    """One per event loop."""

    def __init__(self) -> None:
        self._policy = Policy()
        self._asked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def current(self) -> Policy:
        if time.monotonic() - self._asked_at > _FRESH_S:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(), name="site-policy")
            patience = _FIRST_WAIT_S if self._asked_at == float("-inf") else _WAIT_S
            await asyncio.wait([self._reading], timeout=patience)
            # Also where it is still being read: that is for those who ask in a second to wait for.
            self._asked_at = time.monotonic()
        return self._policy

    async def aclose(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_FIRST_WAIT_S)

    @database_thread()
    async def _read(self) -> None:
        clear_contextvars()  # of this task: it reads for everybody, not for the request that came first
        try:
            self._policy = await sync_to_async(read_policy)()
        except (DatabaseError, InterfaceError) as error:
            log.warning("site_policy_unreadable", error=str(error))
