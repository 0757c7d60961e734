"""Which models there are, for pages. The token path keeps its own registry."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from asgiref.sync import async_to_sync
from django.conf import settings

from engine_worker.broker import BrokerUnavailable, GatewayBroker
from engine_worker.protocol import ModelCard
from inference.models_served import with_adapters
from inference.site_policy import Policy, read_rules
from tenants.models import Tenant

log = structlog.get_logger(__name__)

_TIMEOUT_S = 1.0
"""A page would rather say that it does not know than wait longer."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    cards: dict[str, ModelCard]
    """By name; a card outlives its last worker by a day."""
    alive: frozenset[str]
    """The models of workers that take requests."""


def chat_models(tenant: Tenant | None = None) -> list[str]:
    """Names of models that generate and have a live worker, aliases and adapters too; none when the broker can't be
    reached.

    Those that the tenant may use; without one, those that everybody may.
    """
    fleet, policy, asker = _looked_at(), Policy(read_rules()), _asker(tenant)
    chats = {
        name: card for name, card in fleet.cards.items() if name in fleet.alive and card.kind == "generate"
    }
    names = {*chats, *(alias for alias in policy.aliases_for(asker) if policy.served_name(alias) in chats)}
    return with_adapters((name for name in names if policy.is_visible(name, asker)), chats, policy, asker)


def models_to_ask_for(tenant: Tenant) -> list[str]:
    """Names of all that the tenant may ask for, of whatever kind, aliases and adapters too: what has no worker at the
    moment as well.
    """
    fleet, policy, asker = _looked_at(), Policy(read_rules()), _asker(tenant)
    names = {*fleet.cards, *settings.EXPECTED_MODELS, *policy.rules}
    return with_adapters(
        (name for name in names if policy.is_visible(name, asker)), fleet.cards, policy, asker
    )


def own_names() -> list[str]:
    """Of all models that have or lately had a worker, or that the operator expects: what prices, limits and the ledger
    know them by. No aliases, no adapters.
    """
    return sorted({*_looked_at().cards, *settings.EXPECTED_MODELS})


def _asker(tenant: Tenant | None) -> str:
    return str(tenant.public_id) if tenant else "nobody"


def _looked_at() -> _Fleet:
    try:
        return async_to_sync(_look)()
    except BrokerUnavailable as error:
        log.warning("fleet.unavailable", error=str(error))
        return _Fleet({}, frozenset())


async def _look() -> _Fleet:
    # A client of its own: a page runs on whatever event loop its thread was given.
    broker = GatewayBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        alive = frozenset(worker.model for worker in await broker.workers() if not worker.draining)
        cards = await broker.model_cards()
    finally:
        await broker.aclose()
    return _Fleet({card.model: card for card in cards}, alive)
