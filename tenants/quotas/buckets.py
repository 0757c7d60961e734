"""A limit as the scripts see it: its key in Redis and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tenants.principal import LimitSpec, Principal
from tenants.quotas.periods import period_at

_BUDGET: Final = -1
"""Stands for the period of a budget in the scripts."""


def tenant_prefix(tenant_public_id: str) -> str:
    """Of every quota key of a tenant: one hash tag, so one node of a cluster, so one script."""
    return f"weir:{{t:{tenant_public_id}}}:"


def record_key(tenant_public_id: str, reservation_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}reservation:{reservation_id}"


def open_key(tenant_public_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}open"


def late_key(tenant_public_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}late"


def refused_key(tenant_public_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}refused"


def line_keys(tenant_public_id: str, key_public_id: str) -> list[str]:
    line = f"{tenant_prefix(tenant_public_id)}line:{key_public_id}"
    return [line, f"{line}:alive"]


def warm_key(tenant_public_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}warm"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A limit as the scripts see it."""

    key: str
    args: tuple[str | int, ...]


def bucket_of(principal: Principal, spec: LimitSpec, moment: datetime) -> Bucket:
    """The bucket of this principal's limit; of a budget that of the period in which `moment` is."""
    tenant, owner, hard = principal.tenant_public_id, f"{spec.scope}:{spec.owner_id}", int(spec.is_hard)
    if spec.calendar is None:
        key = f"{tenant_prefix(tenant)}quota:{owner}:{spec.metric}:{spec.period_s}"
        return Bucket(key, (spec.metric.value, spec.amount, spec.period_s, spec.burst, hard, owner))
    period = period_at(spec.calendar, moment, principal.zone)
    known_as = f"{owner}:{spec.metric}:{spec.serial}"
    return Bucket(
        key=f"{tenant_prefix(tenant)}budget:{known_as}:{period.name}",
        args=(spec.metric.value, spec.amount, _BUDGET, period.ends_at_ms, hard, known_as),
    )
