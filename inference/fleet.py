"""What the engine workers serve right now, for pages. The token path keeps its own registry."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from asgiref.sync import async_to_sync
from django.conf import settings

from engine_worker.broker import BrokerUnavailable, GatewayBroker
from inference.site_policy import Policy, read_rules
from tenants.models import Tenant

log = structlog.get_logger(__name__)

_TIMEOUT_S = 1.0
"""A page would rather say that it does not know than wait longer."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    context_length: int


def served_models(tenant: Tenant | None = None) -> tuple[ServedModel, ...]:
    """Models that generate and have a live worker, aliases too, by name; none when the broker can't be reached.

    Those that the tenant may use; without one, those that everybody may.
    """
    try:
        served = async_to_sync(_served_models)()
    except BrokerUnavailable as error:
        log.warning("fleet.unavailable", error=str(error))
        return ()
    policy = Policy(read_rules())
    asker = str(tenant.public_id) if tenant else "nobody"
    known = {model.name: model for model in served}
    for alias in policy.aliases_for(asker):
        if (target := known.get(policy.rules[alias].target)) is not None:
            known[alias] = ServedModel(alias, target.context_length)
    return tuple(known[name] for name in sorted(known) if policy.is_visible(name, asker))


async def _served_models() -> tuple[ServedModel, ...]:
    # A client of its own: a page runs on whatever event loop its thread was given.
    broker = GatewayBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        alive = {worker.model for worker in await broker.workers() if not worker.draining}
        cards = await broker.model_cards()
    finally:
        await broker.aclose()
    return tuple(
        ServedModel(card.model, card.context_length)
        for card in cards
        if card.model in alive and card.kind == "generate"
    )
