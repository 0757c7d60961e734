"""`/v1/quota` says what the limits then do."""

from __future__ import annotations

import httpx
import pytest

from tenants.principal import LimitMetric
from tests.factories import make_key, make_tenant, set_limit


@pytest.mark.django_db(transaction=True)
def test_what_is_left(site, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 3, period_s=86400)
    headers = {"Authorization": f"Bearer {make_key(tenant).secret}"}
    with httpx.Client(base_url=f"{site.url}/v1/", headers=headers, timeout=60) as client:

        def requests_left() -> int:
            answer = client.get("quota").json()
            assert (answer["object"], answer["tier"]) == ("quota", "standard")
            (limit,) = [each for each in answer["data"] if each["metric"] == "requests"]
            assert (limit["scope"], limit["limit"], limit["period_s"]) == ("tenant", 3, 86400)
            return limit["remaining"]

        ask = {"model": model, "prompt": "a", "max_tokens": 1}
        for left in (3, 2, 1):
            assert requests_left() == left
            assert client.post("completions", json=ask).status_code == 200
        assert requests_left() == 0
        assert client.post("completions", json=ask).status_code == 429
