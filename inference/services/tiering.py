"""A request that wants to go later than its key would: `service_tier`, or vLLM's `priority`. Never earlier."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from asgiref.sync import sync_to_async
from django.conf import settings

from inference.errors import InvalidRequest, NotAllowed
from tenants.principal import Principal, TierSpec
from tenants.principal_selectors import tiers_from

_OWN: Final = (None, "auto", "default")


async def in_asked_tier(
    principal: Principal, *, service_tier: str | None = None, priority: int | None = None
) -> Principal:
    """The principal in the tier that the request names: its own, or one after it.

    `flex` is the tier of batches, `priority` the first one, any other word a tier's name; a number says how
    many tiers after the key's own, the last one at most. Raises InvalidRequest, NotAllowed.
    """
    if service_tier in _OWN and not priority:
        return principal
    if service_tier not in _OWN and priority:
        raise InvalidRequest("Give 'service_tier' or 'priority', not both.", param="priority")
    own = principal.tier
    tiers = await sync_to_async(tiers_from)(0)
    if service_tier in _OWN:
        later = [tier for tier in tiers if tier.rank > own.rank]
        if priority is None or priority < 0:
            raise InvalidRequest(
                "'priority' must be 0, your key's tier, or a number of tiers after it.", param="priority"
            )
        return replace(principal, tier=later[min(priority, len(later)) - 1]) if later else principal
    assert service_tier is not None
    asked = _named(service_tier, tiers)
    if service_tier == "flex" and (asked is None or asked.rank <= own.rank):
        return principal  # goes last as it is
    if asked is None:
        raise InvalidRequest(
            f"There is no tier '{service_tier[:40]}' here: use {', '.join(tier.name for tier in tiers)}, auto, "
            "default, flex or priority.",
            param="service_tier",
        )
    if asked.rank < own.rank:
        raise NotAllowed(
            f"'service_tier' asks for '{asked.name}', but your key's requests go in '{own.name}' or after it: leave it "
            "out, or name one of these.",
            code="tier_not_open",
            param="service_tier",
        )
    return replace(principal, tier=asked) if asked.rank > own.rank else principal


def told_tier(service_tier: str | None, *, own: TierSpec, served: TierSpec) -> str:
    """What an answer says served it, in the request's own word where it had one."""
    if service_tier == "flex":
        return "flex" if served.name == settings.BATCH_TIER else "default"
    if service_tier not in _OWN:
        return str(service_tier)
    return "default" if served.name == own.name else served.name


async def told_again(rank: int, *, own: TierSpec) -> str:
    """What `told_tier` said of a request whose words are gone, by the rank of its tier."""
    if rank == own.rank:
        return "default"
    tiers = await sync_to_async(tiers_from)(0)
    name = next((tier.name for tier in tiers if tier.rank == rank), "default")
    return "flex" if name == settings.BATCH_TIER else name


def _named(service_tier: str, tiers: list[TierSpec]) -> TierSpec | None:
    if service_tier == "priority":
        return tiers[0] if tiers else None
    name = settings.BATCH_TIER if service_tier == "flex" else service_tier
    return next((tier for tier in tiers if tier.name == name), None)
