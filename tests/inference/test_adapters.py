"""Who may ask for which LoRA adapter: MODEL:ADAPTER, of all tenants or of one."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from django.conf import settings

from engine_worker.broker import WorkerBroker
from engine_worker.protocol import WorkerStatus
from inference.errors import NotAllowed, NotFound
from inference.models_served import visible_adapters
from inference.runtime import Runtime
from inference.schemas.chat import ChatCompletionRequest
from inference.services.generation import Generation
from inference.services.submission import Submission, new_request_id
from inference.services.submit import submit
from tenants.principal import LimitMetric
from tests.engine_worker.models import a_card, byte_tokenizer
from tests.factories import a_limit, a_principal

pytestmark = pytest.mark.django_db(transaction=True)
"""A tenant's first reservation looks up in the ledger what it has spent."""


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime()
    yield runtime
    await runtime.aclose()


@pytest.fixture
async def worker() -> AsyncIterator[WorkerBroker]:
    card = msgspec.structs.replace(a_card(), adapters={"polite": "", "secret": "tenant-a"})
    name = card.model
    broker = WorkerBroker(settings.REDIS_URL, model=name, worker_id="w", timeout_s=5)
    await broker.register(card, byte_tokenizer().to_str().encode())
    numbers = ("started_at_ms", "updated_at_ms", "steps", "running", "waiting", "kv_blocks_total")
    await broker.heartbeat(
        WorkerStatus(
            worker_id="w",
            model=name,
            device="cpu",
            max_num_seqs=1,
            step_ms=1.0,
            kv_blocks_used=0,
            **dict.fromkeys(numbers, 1),
        ),
        tokenizer_sha256="x",
    )
    broker.name = name  # type: ignore[attr-defined]
    yield broker
    await broker.aclose()


async def test_an_adapter_of_one_tenant_does_not_exist_for_others(runtime, worker):
    get, name = runtime.models.get, worker.name
    assert (await get(name, tenant_public_id="tenant-b")).adapter == ""
    for tenant, visible in (("tenant-a", ["polite", "secret"]), ("tenant-b", ["polite"])):
        model = await get(name, tenant_public_id=tenant)
        assert visible_adapters(model.card, tenant) == visible
        for adapter in visible:
            assert (await get(f"{name}:{adapter}", tenant_public_id=tenant)).adapter == adapter
    hidden, absent = (f"{name}:{adapter}" for adapter in ("secret", "absent"))
    messages = []
    for asked in (hidden, absent):
        with pytest.raises(NotFound) as refused:
            await get(asked, tenant_public_id="tenant-b")
        messages.append(refused.value.message.replace(asked, "X"))
    assert messages[0] == messages[1], "what is hidden must look like what is not there"


async def submitted(runtime: Runtime, name: str, **changes: Any) -> Generation:
    tenant = uuid.uuid4().hex
    limit = a_limit(LimitMetric.REQUESTS, 10, period_s=86_400, owner_id=tenant)
    principal = replace(a_principal(limit, tenant_public_id=tenant), **changes)
    submission = Submission(
        model=await runtime.models.get(name, tenant_public_id=tenant),
        prompt_token_ids=[1, 2],
        fields=ChatCompletionRequest(model="m", messages=[]),
        requested_tokens=3,
        max_tokens_param="max_tokens",
        endpoint="test",
        request_id=new_request_id("test"),
    )
    return await submit(runtime, principal, submission)


async def test_the_worker_is_told_which_adapter(runtime, worker):
    generation = await submitted(runtime, f"{worker.name}:polite")
    (claim,) = await worker.claim(1)
    assert claim.request.adapter == "polite"
    generation.leave()


async def test_a_key_is_bound_to_a_model_with_its_adapters_or_to_an_adapter_alone(runtime, worker):
    base, polite = worker.name, f"{worker.name}:polite"
    assert {base, polite} <= set(await runtime.models.known_names("tenant-b"))
    assert f"{base}:secret" not in await runtime.models.known_names("tenant-b")
    for bound, name in ((base, base), (base, polite), (polite, polite)):
        (await submitted(runtime, name, allowed_models=frozenset([bound]))).leave()
    with pytest.raises(NotAllowed, match=f"may not use '{base}'"):
        await submitted(runtime, base, allowed_models=frozenset([polite]))
    with pytest.raises(NotAllowed, match=f"may not use '{polite}'"):
        await submitted(runtime, polite, allowed_models=frozenset(["another"]))
