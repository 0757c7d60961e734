"""Cached prompt tokens, from the engine to the client and the ledger."""

from __future__ import annotations

import time

from inference.models import UsageRecord
from inference.services.submission import cache_salt
from inference.services.usage import drain_usage_stream
from tests.factories import make_key, make_tenant

QUESTION = [{"role": "user", "content": "What does a weir do, and for whom does it do it?"}]


def test_fault_33_cached_tokens_are_a_tenants_own(sdk, transactional_db, engine_model):
    tenants = [make_tenant(), make_tenant()]
    secrets = [make_key(tenant).secret for tenant in tenants]

    def ask(secret: str, **extra: str) -> int:
        answer = sdk(secret).chat.completions.create(
            model=engine_model, messages=QUESTION, max_tokens=4, temperature=0, extra_body=extra
        )
        assert answer.usage.prompt_tokens == len(f"user: {QUESTION[0]['content']}\nassistant:")
        return answer.usage.prompt_tokens_details.cached_tokens

    first, again = ask(secrets[0]), ask(secrets[0])
    assert (first, again) == (0, 64)
    assert ask(secrets[1]) == 0
    assert ask(secrets[0], cache_salt="mine") == 0
    assert ask(secrets[1], cache_salt="mine") == 0
    assert ask(secrets[0], cache_salt="mine") == 64

    deadline = time.monotonic() + 30
    while UsageRecord.objects.filter(tenant=tenants[0]).count() < 4:
        assert time.monotonic() < deadline
        drain_usage_stream()
        time.sleep(0.05)
    rows = UsageRecord.objects.filter(tenant=tenants[0]).order_by("created_at")
    assert [row.cached_tokens for row in rows] == [0, 64, 0, 64]


def test_a_salt_names_the_tenant_and_what_it_chose():
    salts = {cache_salt(tenant, own) for tenant in ("a", "b") for own in ("", "x")}
    assert len(salts) == 4
    assert all(len(salt) == 64 for salt in salts)
