"""A proposed limit against the traffic that was."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.services.ledger import record_usage
from inference.services.try_limit import Asked, play, try_limit
from tenants.principal import Calendar, LimitMetric
from tests.factories import a_budget, a_limit, make_tenant
from tests.inference.ledger_driving import an_event

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def asked(at_s: float, *, takes_s: float = 1, least: int = 1, reserved: int = 1, used: int = 1) -> Asked:
    return Asked(f"at-{at_s:g}", at_s, at_s + takes_s, least, reserved, used)


def test_a_rate_refuses_what_its_bucket_does_not_hold():
    limit = a_limit(LimitMetric.REQUESTS, 6, period_s=60, burst=2)  # one comes back every ten seconds
    tried = play(limit, [asked(at) for at in (0, 1, 2, 9.9, 10, 11, 40)])
    assert (tried.requests, tried.refused, tried.never) == (7, 3, 0)
    assert tried.examples == ["at-2", "at-9.9", "at-11"]
    assert tried.longest_wait_s == pytest.approx(9, abs=0.01)


def test_what_was_reserved_and_not_used_comes_back_at_the_end():
    limit = a_limit(LimitMetric.TOKENS, 100, period_s=86_400, burst=100)
    first = asked(0, takes_s=5, least=10, reserved=90, used=20)
    again = [asked(at, least=10, reserved=60, used=60) for at in (1, 6)]
    tried = play(limit, [first, *again])
    assert (tried.refused, tried.examples, tried.used) == (1, ["at-1"], 80)
    tried = play(limit, [asked(0, least=101, reserved=200, used=150)])
    assert (tried.refused, tried.never) == (1, 1)


def test_slots_and_budgets():
    limit = a_limit(LimitMetric.CONCURRENCY, 2)
    tried = play(limit, [asked(0, takes_s=10), asked(1, takes_s=2), asked(2), asked(3.5), asked(10)])
    assert (tried.refused, tried.examples) == (1, ["at-2"])
    at = datetime(2026, 11, 29, 22, 59, tzinfo=UTC).timestamp()  # a minute before midnight in Berlin
    budget = a_budget(LimitMetric.TOKENS, 10, calendar=Calendar.DAY)
    tried = play(
        budget,
        [asked(at, used=8, reserved=8), asked(at + 1, used=8), asked(at + 61, used=8)],
        "Europe/Berlin",
    )
    assert (tried.refused, tried.used) == (1, 16)
    assert tried.longest_wait_s == pytest.approx(59, abs=0.01)
    assert {day: of.refused for day, of in tried.days.items()} == {
        date(2026, 11, 29): 1,
        date(2026, 11, 30): 0,
    }
    soft = a_budget(LimitMetric.TOKENS, 10, calendar=Calendar.DAY, is_hard=False)
    assert play(soft, [asked(at, used=50)]).refused == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 30), st.integers(0, 50), st.integers(0, 50)),
        max_size=40,
    ),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_what_is_admitted_never_passes_what_was_granted(given, amount, burst):
    """Of a rate whose requests use no less than they reserve: no debt, so no more than burst and refill."""
    limit = a_limit(LimitMetric.TOKENS, amount, period_s=60, burst=burst)
    requests = [
        asked(
            at, takes_s=takes, least=least, reserved=least + more, used=min(least + more, max(least, burst))
        )
        for at, takes, least, more in sorted(given)
    ]
    tried = play(limit, requests)
    last_s = max((one.at_s for one in requests), default=0)
    assert tried.used <= burst + last_s * amount / 60 + 1e-6
    assert tried.requests == len(requests) == sum(of.requests for of in tried.days.values())
    assert play(a_limit(LimitMetric.TOKENS, 10**9, burst=10**9), requests).refused == 0


@pytest.mark.django_db
def test_the_ledger_is_what_is_played():
    tenant, other = make_tenant(), make_tenant()
    for whose in (tenant, other):
        record_usage(
            [
                an_event(
                    str(whose.public_id), model="a" if n % 2 else "b", prompt_tokens=10, completion_tokens=n,
                    created_at_ms=(at := int((NOW - timedelta(days=n)).timestamp() * 1000)), finished_at_ms=at + 1000,
                )
                for n in range(1, 10)
            ]
        )  # fmt: skip
    wide = a_limit(LimitMetric.TOKENS, 10**6)
    assert try_limit(tenant, wide, now=NOW).requests == 7
    assert try_limit(tenant, wide, days=31, now=NOW).used == sum(10 + n for n in range(1, 10))
    assert try_limit(tenant, wide, model="a", now=NOW).requests == 4
    narrow = try_limit(tenant, a_limit(LimitMetric.TOKENS, 15, burst=15), now=NOW)
    assert (narrow.refused, narrow.never) == (
        0,
        0,
    )  # output beyond the burst becomes a debt, as in the script
    month = try_limit(tenant, a_budget(LimitMetric.TOKENS, 40, calendar=Calendar.MONTH), days=31, now=NOW)
    assert month.refused == 7
