"""Hard budgets as clients meet them: an answer that ends with the budget, and a refusal that says so."""

from __future__ import annotations

from datetime import UTC, datetime

import openai
import pytest

from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import ModelPrice
from tenants.principal import Calendar, LimitMetric
from tests.factories import make_key, make_tenant, set_limit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_ends_where_the_budget_ends(sdk, model, stream):
    """FAULTS 50, 52 and 71: in money, to the token, through the real gateway."""
    ModelPrice.objects.create(
        model=model,
        valid_from=datetime(2026, 1, 1, tzinfo=UTC),
        input_microusd_per_mtok=2_000_000,
        cached_input_microusd_per_mtok=2_000_000,
        output_microusd_per_mtok=3_000_000,
    )
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.COST, 2 * 5 + 3 * 9 + 1, calendar=Calendar.MONTH)
    client = sdk(make_key(tenant).secret)
    asked = {"model": model, "prompt": "five!", "max_tokens": 50, "seed": 1}
    if stream:
        (end,) = [
            choice.finish_reason
            for chunk in client.completions.create(**asked, stream=True)
            for choice in chunk.choices
            if choice.finish_reason
        ]
    else:
        answer = client.completions.create(**asked)
        end = answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == 9
    assert end == "budget_exceeded"

    # The SDK's own retries would wait in vain: it obeys the header and gives up at once.
    with pytest.raises(openai.RateLimitError) as refused:
        client.with_options(max_retries=2).completions.create(**asked)
    assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert "the tenant's month is spent" in refused.value.message
    with pytest.raises(openai.BadRequestError) as never:
        client.completions.create(model=model, prompt="x" * 40, max_tokens=1)
    assert never.value.code == "request_exceeds_limit"

    drain_usage_stream()
    row = UsageRecord.objects.for_tenant(tenant).get()
    assert (row.prompt_tokens, row.completion_tokens, row.cost_microusd) == (5, 9, 2 * 5 + 3 * 9)
