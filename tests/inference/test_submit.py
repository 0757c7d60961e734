"""Reserve and enqueue as one: what is refused or cut off half way leaves nothing taken."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings
from msgspec import convert, structs
from redis import asyncio as aioredis
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from engine_worker.broker import Held, WorkerBroker, keys
from engine_worker.protocol import GenerateRequest, ModelCard, Rung, SamplingDefaults, WorkerStatus
from inference import models_served
from inference.api.sse import events_of
from inference.errors import InvalidRequest, NotFound, Overloaded, RateLimited
from inference.models_served import ModelCatalogue, ServedModel
from inference.prompts import PromptRenderer
from inference.runtime import Runtime
from inference.schemas.chat import ChatCompletionRequest
from inference.services.collect import collect
from inference.services.refusal import duration
from inference.services.resume import resume
from inference.services.submission import Submission, new_request_id
from inference.services.submit import submit
from inference.site_policy import NO_DEFAULTS, Defaults
from inference.worker_watch import WorkerWatch
from tenants.principal import LimitMetric, Principal
from tests.engine_worker.models import a_card, byte_tokenizer
from tests.factories import a_limit, a_principal

# What Redis does not know of a tenant is recalled from the ledger.
pytestmark = pytest.mark.django_db(transaction=True)
BODY = ChatCompletionRequest(model="m", messages=[])


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime()
    yield runtime
    await runtime.aclose()


@pytest.fixture
def model() -> ServedModel:
    card = a_card()
    return ServedModel(card, PromptRenderer(card, byte_tokenizer().to_str().encode()), int(time.time()))


@pytest.fixture
def principal() -> Principal:
    tenant = uuid.uuid4().hex
    limits = (
        a_limit(LimitMetric.REQUESTS, 10, period_s=86_400, owner_id=tenant),
        a_limit(LimitMetric.TOKENS, 1000, period_s=86_400, owner_id=tenant),
        a_limit(LimitMetric.CONCURRENCY, 5, owner_id=tenant),
    )
    principal = a_principal(*limits, tenant_public_id=tenant)
    return replace(principal, tier=replace(principal.tier, max_queued_per_tenant=1))


def ask(model: ServedModel, **given: object) -> Submission:
    fields: dict[str, object] = {
        "model": model,
        "prompt_token_ids": [1, 2, 3],
        "fields": BODY,
        "requested_tokens": 7,
        "max_tokens_param": "max_tokens",
        "endpoint": "test",
        "request_id": new_request_id("test"),
    }
    return Submission(**(fields | given))  # type: ignore[arg-type]


async def left(runtime: Runtime, principal: Principal) -> list[int]:
    return [bucket.remaining for bucket in await runtime.quotas.peek(principal)]


async def settled(runtime: Runtime) -> None:
    while runtime._tasks:
        await asyncio.wait(runtime._tasks, timeout=10)


async def test_a_full_queue_refuses_and_gives_back(runtime, model, principal):
    first = await submit(runtime, principal, ask(model))
    assert await left(runtime, principal) == [9, 990, 4]
    with pytest.raises(RateLimited) as refused:
        await submit(runtime, principal, ask(model))
    assert "your tenant's share" in refused.value.message
    full = replace(principal, tier=replace(principal.tier, max_queued=1, max_queued_per_tenant=1))
    with pytest.raises(Overloaded) as overloaded:
        await submit(runtime, full, ask(model))
    assert "the tier's queue" in overloaded.value.message
    assert overloaded.value.retry_after_ms > 0
    assert refused.value.retry_after_ms > 0
    await settled(runtime)
    assert await left(runtime, principal) == [9, 990, 4]
    first.leave()
    await settled(runtime)
    # It never ran: no token is charged, its slot is free.
    assert await left(runtime, principal) == [9, 1000, 5]


async def test_a_flood_is_refused_without_a_word_to_redis(runtime, model, principal):
    """Ten times what can be served must not cost the gateway and Redis ten times the work."""
    patient = replace(principal, tier=replace(principal.tier, max_queued_per_tenant=100, max_wait_s=100))
    await submit(runtime, patient, ask(model))
    prefix = keys.model_prefix(model.card.model)
    line = f"{patient.tier.rank}:{patient.tenant_public_id}"
    async with aioredis.Redis.from_url(settings.REDIS_URL) as redis:
        await redis.set(f"{prefix}pace:{line}", 90_000)  # ms that a place in this line took lately

        async def scripts_run() -> int:
            return int((await redis.info("commandstats"))["cmdstat_evalsha"]["calls"])

        with pytest.raises(Overloaded, match="wait longer than your tier allows"):
            await submit(runtime, patient, ask(model))
        await settled(runtime)
        before = await scripts_run()
        for _ in range(50):
            with pytest.raises(Overloaded, match="wait longer than your tier allows") as refused:
                await submit(runtime, patient, ask(model))
            assert 1000 <= refused.value.retry_after_ms <= 30_000
        await settled(runtime)
        # Once a second it is asked again, with a reservation that is given back; and there is the sweep.
        assert await scripts_run() - before < 40
    assert await left(runtime, patient) == [9, 990, 4]


async def test_cancelled_at_any_moment_nothing_stays_taken(runtime, model, principal):
    principal = replace(principal, tier=replace(principal.tier, max_queued_per_tenant=100))
    await submit(runtime, principal, ask(model))  # connections are open, scripts are loaded
    before = await left(runtime, principal)
    for step in range(12):
        task = asyncio.create_task(submit(runtime, principal, ask(model)))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        try:
            generation = await task
        except asyncio.CancelledError:
            continue
        generation.leave()
    await settled(runtime)

    async def is_idle() -> bool:
        (_, _, slots), (_, _, free) = before, await left(runtime, principal)
        return free == slots

    deadline = time.monotonic() + 30
    while not await is_idle():
        assert time.monotonic() < deadline, "a slot stayed taken"
        await asyncio.sleep(0.1)


async def test_the_same_id_twice_is_one_request(runtime, model, principal):
    asked = ask(model)
    generation = await submit(runtime, principal, asked)
    generation.leave()
    await settled(runtime)
    before = await left(runtime, principal)
    with pytest.raises(Exception, match="exists already"):
        await submit(runtime, principal, asked)
    assert await left(runtime, principal) == before


async def test_the_bounds_on_length(runtime, model, principal):
    for prompt, requested, code in [
        ([1] * 100, None, "context_length_exceeded"),
        ([1] * 99, 2, "context_length_exceeded"),
        ([], 1, "invalid_request"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            await submit(runtime, principal, ask(model, prompt_token_ids=prompt, requested_tokens=requested))
        assert refused.value.code == code
    generation = await submit(
        runtime, principal, ask(model, prompt_token_ids=[1] * 60, requested_tokens=None)
    )
    # FAULTS 17: without max_tokens, what the context leaves.
    claim = await claimed(model)
    assert claim.sampling.max_tokens == 40
    generation.leave()


QWEN = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("own", "here", "named", "expected"),
    [
        (SamplingDefaults(), NO_DEFAULTS, {}, (1.0, 0, 1.0, 1.0)),
        (QWEN, NO_DEFAULTS, {}, (0.6, 20, 0.95, 1.05)),
        (QWEN, Defaults(temperature=0.0), {}, (0.0, 20, 0.95, 1.05)),
        (
            QWEN,
            Defaults(top_p=0.5),
            {"temperature": 1.5, "top_k": 0, "repetition_penalty": 1.0},
            (1.5, 0, 0.5, 1.0),
        ),
        (QWEN, NO_DEFAULTS, {"top_k": -1, "top_p": 1.0, "temperature": 0.0}, (0.0, 0, 1.0, 1.05)),
    ],
)
async def test_a_request_is_sampled_as_it_says_else_as_the_operator_else_as_the_model(
    runtime, model, principal, own, here, named, expected
):
    model.card, model.defaults = structs.replace(model.card, sampling=own), here
    fields = convert(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], **named}, ChatCompletionRequest
    )
    generation = await submit(runtime, principal, ask(model, fields=fields))
    sampling = (await claimed(model)).sampling
    assert (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.repetition_penalty,
    ) == expected
    generation.leave()


async def test_a_rate_that_binds_says_when_this_request_fits(runtime, model, principal):
    with pytest.raises(InvalidRequest):
        await submit(runtime, principal, ask(model, prompt_token_ids=[1] * 101))
    tight = replace(principal, limits=(a_limit(LimitMetric.TOKENS, 12, owner_id=principal.tenant_public_id),))
    await submit(runtime, tight, ask(model))
    with pytest.raises(RateLimited) as refused:
        await submit(runtime, tight, ask(model))
    # 12 tokens a minute: 2 are left, 10 are asked, so 8 must come back.
    assert 39_000 < refused.value.retry_after_ms <= 40_000
    assert refused.value.type == "tokens"
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "2"


async def claimed(model: ServedModel) -> GenerateRequest:
    worker = WorkerBroker(settings.REDIS_URL, model=model.card.model, worker_id="w", timeout_s=5)
    (claim,) = await worker.claim(1)
    await worker.aclose()
    return claim.request


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (12, "12ms"), (1000, "1s"), (1500, "1.5s"), (59_999, "59.999s"), (60_000, "1m0s"),
     (360_000, "6m0s"), (3_600_000, "1h0m0s"), (90_061_000, "25h1m1s")],
)  # fmt: skip
def test_durations_as_openai_writes_them(ms, text):
    assert duration(ms) == text


async def test_an_engine_beyond_its_means_sheds_low_tiers_first(runtime, model, principal):
    """The last rungs of the ladder, which a worker reports with its heartbeat."""
    low = replace(principal, tier=replace(principal.tier, rank=1, max_queued_per_tenant=100))
    high = replace(low, tier=replace(low.tier, rank=0))
    roomy = ServedModel(replace_card(model, 700), model.renderer, model.first_seen_at)
    silent = ask(roomy, requested_tokens=None)
    worker = WorkerBroker(settings.REDIS_URL, model=roomy.card.model, worker_id="w", timeout_s=5)
    try:
        await worker.register(roomy.card, byte_tokenizer().to_str().encode())
        seen = []
        for rung in (Rung.NO_SPECULATION, Rung.SHORTER_ANSWERS, Rung.REFUSING, Rung.NONE):
            await worker.heartbeat(status(roomy.card.model, rung), tokenizer_sha256="x")
            catalogue = ModelCatalogue(runtime.broker, runtime.policy)
            roomy.rung = (await catalogue.get(roomy.card.model, tenant_public_id="t")).rung
            await catalogue.aclose()
            seen.append(roomy.rung)
            for who, shortest in ((high, Rung.NONE), (low, rung)):
                asked = replace(silent, request_id=new_request_id("test"))
                if shortest >= Rung.REFUSING:
                    with pytest.raises(Overloaded, match="first tier only") as refused:
                        await submit(runtime, who, asked)
                    assert refused.value.retry_after_ms > 0
                    continue
                before = (await left(runtime, who))[1]
                generation = await submit(runtime, who, asked)
                taken = before - (await left(runtime, who))[1]
                assert taken == 3 + (256 if shortest >= Rung.SHORTER_ANSWERS else 697)
                generation.leave()
                await settled(runtime)
        assert seen == [Rung.NO_SPECULATION, Rung.SHORTER_ANSWERS, Rung.REFUSING, Rung.NONE]
    finally:
        await worker.aclose()


async def test_who_waits_hears_that_no_worker_is_left(runtime, model, principal, monkeypatch, settings):
    """It was unloaded, say, or its machine is lost: as who comes later, they are not held until their deadline.

    Whole answers and streams; but batches wait, and so does who is read on.
    """
    monkeypatch.setattr(models_served, "WORKER_ABSENCE_S", 2.0)
    monkeypatch.setattr(models_served, "_REFRESH_S", 0.1)
    monkeypatch.setattr(WorkerWatch, "INTERVAL_S", 0.2)
    name, prompt = model.card.model, 3
    patient = replace(principal, tier=replace(principal.tier, max_queued_per_tenant=100))
    late = replace(patient, tier=replace(patient.tier, name=settings.BATCH_TIER))
    worker = WorkerBroker(settings.REDIS_URL, model=name, worker_id="w", timeout_s=5)
    before = await left(runtime, patient)
    try:
        await worker.register(model.card, byte_tokenizer().to_str().encode())
        await worker.heartbeat(status(name, Rung.NONE), tokenizer_sha256="x")
        await runtime.models.get(name)
        whole, streamed, short = [await submit(runtime, patient, ask(model)) for _ in range(3)]
        batches = (
            await submit(runtime, late, ask(model)),
            await submit(runtime, patient, ask(model, endpoint="batches")),
        )
        again = await resume(runtime, patient, batches[0].ticket.request_id)
        # While there is a worker nobody is told that there is none, however long it has no room.
        for _ in range(3):
            await worker.heartbeat(status(name, Rung.NONE), tokenizer_sha256="x")
            assert await whole.next(1.0) is None
        await worker.farewell()
        events = events_of([streamed], render=lambda index, chunk: (), close=tuple)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(collect([whole]), anext(events), return_exceptions=True)
            while (chunk := await short.next(0.1)) is None:
                pass
        assert chunk.finish is not None
        for error in (*answers, short.failure()):
            assert isinstance(error, Overloaded), error
            assert (error.code, error.retry_after_ms) == ("model_unavailable", 5000)
        short.leave()
        for waiting in (*batches, again):
            assert await waiting.next(1.0) is None
        # On record as it was told: a failure with its reason, not a client that left.
        for each in (whole, streamed, short):
            account = await runtime.broker.account_of(name, each.ticket.request_id)
            assert account.event is not None
            told = (account.event.finish_reason, account.event.error_code, account.event.prompt_tokens)
            assert told == ("error", "model_unavailable", 0)
        await settled(runtime)
        slots = len(batches)
        assert await left(runtime, patient) == [
            before[0] - 5,
            before[1] - slots * (prompt + 7),
            before[2] - slots,
        ]
        claims = await worker.claim(9)  # one comes back: only those who still wait are served
        assert {claim.request.request_id for claim in claims} == {each.ticket.request_id for each in batches}
        for waiting in batches:
            waiting.leave()
        held = [Held(claim.request.request_id, claim.epoch) for claim in claims]
        async with asyncio.timeout(60):
            while any(waiting.finish is None for waiting in batches):
                await worker.release(held, failed=False)
                await asyncio.sleep(0.01)
    finally:
        await worker.aclose()


def replace_card(model: ServedModel, context_length: int) -> ModelCard:
    return structs.replace(model.card, context_length=context_length)


def status(model: str, rung: Rung) -> WorkerStatus:
    numbers = dict.fromkeys(
        (
            "started_at_ms",
            "updated_at_ms",
            "steps",
            "running",
            "waiting",
            "kv_blocks_total",
            "kv_blocks_used",
        ),
        1,
    )
    return WorkerStatus(
        worker_id="w", model=model, device="cpu", max_num_seqs=1, step_ms=1.0, rung=rung, **numbers
    )


async def test_an_embedding_model_generates_no_text(runtime, model, principal):
    embedder = ServedModel(structs.replace(model.card, kind="embedding"), model.renderer, model.first_seen_at)
    with pytest.raises(InvalidRequest, match="is an embedding model"):
        await submit(runtime, principal, ask(embedder))


async def test_what_serves_everybody_is_not_in_the_context_of_the_request_that_came_first(model, principal):
    """Else its log lines name that request for as long as the process lives."""
    made: list[tuple[asyncio.Task[Any], Context]] = []

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        if options.get("context") is None:
            options["context"] = copy_context()
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        made.append((task, options["context"]))
        return task

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)
    runtime = None
    try:
        with bound_contextvars(request_id="first"), capture_logs([merge_contextvars]) as lines:
            runtime = Runtime()
            generation = await submit(runtime, principal, ask(model))
            with pytest.raises(NotFound):
                await runtime.models.get(f"nobody-{uuid.uuid4().hex}")
            loop.call_soon(time.sleep, 0.5)
            await asyncio.sleep(0.1)  # longer than until the next tick, which is due first therefore
            generation.leave()
            await settled(runtime)
    finally:
        loop.set_task_factory(None)
        if runtime is not None:
            await runtime.aclose()
    held = [line for line in lines if line["event"] == "event_loop_held"]
    assert held
    assert not any("request_id" in line for line in held)
    told = {
        task.get_name(): any(
            variable.name.startswith("structlog_") and value is not ...  # what is cleared
            for variable, value in context.items()
        )
        for task, context in made
    }
    shared = (
        "live-fan-in",
        "model-catalogue",
        "site-policy",
        "TenantWatch",
        "ReservationWatch",
        "broker-sweep",
    )
    assert {name: told[name] for name in shared} == dict.fromkeys(shared, False)
