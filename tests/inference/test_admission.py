"""A request's way in is one call, and tells the same as two."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

import pytest

from engine_worker.broker import UnknownRequest
from inference.errors import Overloaded
from inference.services.decision import as_text, from_text, told_beforehand
from inference.services.submit import submit
from tenants.principal import LimitMetric
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import GAP
from tests.factories import a_limit
from tests.inference.test_submit import ask, claimed, left, model, principal, runtime, settled

__all__ = ["model", "principal", "runtime"]  # fixtures
pytestmark = pytest.mark.django_db(transaction=True)


async def test_one_call_queues_and_tells_what_two_would(runtime, model, principal, monkeypatch):
    told, requests = [], []
    for goes_on in (True, False):
        monkeypatch.setattr(QuotaStore, "can_go_on", goes_on)
        tenant = uuid.uuid4().hex
        limits = tuple(replace(limit, owner_id=tenant) for limit in principal.limits)
        theirs = replace(principal, limits=limits, tenant_public_id=tenant)
        generation = await submit(runtime, theirs, ask(model))
        request = await claimed(model)
        account = await runtime.broker.account_of(model.card.model, request.request_id)
        decision = from_text(account.decision)
        assert decision is not None
        assert [(limit.asked, limit.remaining) for limit in decision.limits] == [(1, 9), (10, 990), (1, 4)]
        assert [limit.remaining for limit in decision.limits] == [
            bucket.remaining for bucket in generation.buckets
        ]
        told.append([replace_owner(limit) for limit in decision.limits])
        requests.append((request.sampling.max_tokens, request.deadline_ms - request.created_at_ms))
    assert told[0] == told[1]
    assert requests[0] == requests[1]


def replace_owner(limit):
    return (limit.metric, limit.amount, limit.burst, limit.asked, limit.remaining)


async def test_where_the_answer_never_came_nothing_stays_queued_or_taken(
    runtime, model, principal, monkeypatch
):
    """FAULTS 59: the call has done its work, and its client was told no."""
    before = await left(runtime, principal)
    call = runtime.quotas._call_then

    async def lose_the_answer(then, *args):
        await call(then, *args)
        assert then.reply[0] == b"ok"
        raise QuotaUnavailable("lost")

    monkeypatch.setattr(runtime.quotas, "_call_then", lose_the_answer)
    asked = ask(model)
    with pytest.raises(Overloaded) as refused:
        await submit(runtime, principal, asked)
    assert refused.value.code == "quota_unavailable"
    await settled(runtime)
    assert await left(runtime, principal) == before
    deadline = time.monotonic() + 30
    while not await is_gone(runtime, model, asked):
        assert time.monotonic() < deadline, "it is still queued"
        await asyncio.sleep(0.05)


async def is_gone(runtime, model, asked) -> bool:
    try:
        return (await runtime.broker.request_state(model.card.model, asked.request_id)).state == "finished"
    except UnknownRequest:
        return True


def test_a_gap_is_never_in_a_name():
    limit = a_limit(LimitMetric.TOKENS, 100, owner_id=f"a{GAP}b")
    text = as_text(
        told_beforehand([limit], at_ms=1, prompt_tokens=2, max_output_tokens=3, price=None, seed=None)
    )
    assert text.count(GAP) == 2
    filled = from_text(text.replace(GAP, "7"))
    assert (filled.limits[0].owner, filled.limits[0].remaining) == (limit.owner_id, 7)
