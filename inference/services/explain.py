"""Why a request was admitted or refused, and what it was charged: every level, number and price that decided."""

from __future__ import annotations

from dataclasses import dataclass

from asgiref.sync import async_to_sync
from django.conf import settings

from engine_worker.broker import Account, BrokerUnavailable, GatewayBroker, UnknownRequest
from engine_worker.protocol import UsageEvent
from inference.models import UsageAdjustment, UsageRecord
from inference.services.decision import Told, from_text
from inference.services.ledger import UnfitEvent, row_to_be
from tenants.models import ModelPrice
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.store import QuotaStore

_TIMEOUT_S = 2.0


class NothingToExplain(Exception):
    """Nothing is known of such a request in this tenant: absent, too old and another tenant's are the same."""


@dataclass(frozen=True, slots=True)
class ChargedPart:
    what: str
    """`input`, `cached_input`, `output`."""
    tokens: int
    microusd_per_mtok: int

    @property
    def name(self) -> str:
        return self.what.replace("_", " ").capitalize()


@dataclass(frozen=True, slots=True)
class Charge:
    record: UsageRecord
    price: ModelPrice | None
    """None: the model had none, and cost nothing."""
    parts: list[ChargedPart]
    """Their products, summed, divided by a million and rounded once, half up, are the cost."""
    adjustments: list[UsageAdjustment]

    @property
    def total_microusd(self) -> int:
        return self.record.cost_microusd + sum(row.cost_microusd for row in self.adjustments)


@dataclass(frozen=True, slots=True)
class Explanation:
    request_id: str
    decision: Told | None
    """None of requests from before decisions were kept."""
    charge: Charge | None
    """None of what was refused, or has not ended."""

    @property
    def verdict(self) -> str:
        if self.decision is not None and self.decision.binding is not None:
            return "refused"
        return "admitted"


def explain(tenant_id: int, tenant_public_id: str, request_id: str) -> Explanation:
    """From the ledger for what was admitted and has ended; else from the last refusals, and from what is in flight: no
    moment is between these. Raises NothingToExplain."""
    if (known := _in_ledger(tenant_id, request_id)) is not None:
        return known
    for refusal in recent_refusals(tenant_public_id):
        if refusal.request_id == request_id:
            return Explanation(request_id, refusal, None)
    account = _account(request_id)
    if account is None or account.tenant_id != tenant_public_id:
        raise NothingToExplain(request_id)
    if not account.is_over:
        return Explanation(request_id, from_text(account.decision), None)
    if account.event is not None:
        return _to_be(account.event)
    # The ledger took it after it was asked.
    if (known := _in_ledger(tenant_id, request_id)) is not None:
        return known
    raise NothingToExplain(request_id)


def _in_ledger(tenant_id: int, request_id: str) -> Explanation | None:
    record = UsageRecord.objects.filter(tenant_id=tenant_id, request_id=request_id).first()
    return None if record is None else Explanation(request_id, from_text(record.decision), charge_of(record))


def _to_be(event: UsageEvent) -> Explanation:
    try:
        charge = charge_of(row_to_be(event))
    except UnfitEvent:
        charge = None
    return Explanation(event.request_id, from_text(event.decision), charge)


def _account(request_id: str) -> Account | None:
    """None also when Redis can't say."""
    try:
        return async_to_sync(_read_account)(request_id)
    except (BrokerUnavailable, UnknownRequest):
        return None


async def _read_account(request_id: str) -> Account:
    broker = GatewayBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        return await broker.account_of(await broker.model_of(request_id), request_id)
    finally:
        await broker.aclose()


def charge_of(record: UsageRecord) -> Charge:
    price = None
    if record.price_public_id is not None:
        price = ModelPrice.objects.filter(public_id=record.price_public_id).first()
    parts = []
    if price is not None:
        parts = [
            ChargedPart("input", record.prompt_tokens - record.cached_tokens, price.input_microusd_per_mtok),
            ChargedPart("cached_input", record.cached_tokens, price.cached_input_microusd_per_mtok),
            ChargedPart("output", record.completion_tokens, price.output_microusd_per_mtok),
        ]
    adjustments = UsageAdjustment.objects.filter(tenant=record.tenant_id, request_id=record.request_id)
    return Charge(record, price, parts, list(adjustments.order_by("id")))


def recent_refusals(tenant_public_id: str) -> list[Told]:
    """The last some hundred of a week, newest first; none when Redis can't say."""
    try:
        texts = async_to_sync(_refusals)(tenant_public_id)
    except QuotaUnavailable:
        return []
    return [refusal for text in texts if (refusal := from_text(text)) is not None]


async def _refusals(tenant_public_id: str) -> list[bytes]:
    # A store of its own: whoever asks runs on whatever event loop its thread was given.
    store = QuotaStore(settings.REDIS_URL, timeout_s=_TIMEOUT_S, max_connections=1)
    try:
        return await store.refusals(tenant_public_id)
    finally:
        await store.aclose()
