"""Who opens the operator's admin, and what there is to see."""

from __future__ import annotations

import pytest

from inference.models import Alert
from inference.services.ledger import record_usage
from tenants.principal import LimitMetric
from tests.factories import make_cast, make_key, make_operator, set_limit
from tests.inference.ledger_driving import an_event


@pytest.fixture
def operator():
    return make_operator()


@pytest.fixture
def browser(client, operator):
    client.force_login(operator)
    return client


@pytest.fixture
def world():
    """At least one row behind every page."""
    cast = make_cast()
    issued = make_key(cast.tenant)
    set_limit(cast.tenant, LimitMetric.TOKENS, 1000)
    set_limit(issued.api_key, LimitMetric.REQUESTS, 10)
    set_limit(cast.tenant.tier, LimitMetric.CONCURRENCY, 10)
    record_usage([an_event(str(cast.tenant.public_id), "r1"), an_event("nobody", "r2")])
    Alert.objects.create(
        tenant=cast.tenant, kind="budget", subject="b", period="2026-11", threshold=50, title="t", text="t"
    )
    return cast, issued
