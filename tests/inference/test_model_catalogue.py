"""The models that a gateway knows: one that can't be read, or is still being read, keeps nobody from the others."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from django.conf import settings
from msgspec import structs
from redis import asyncio as aioredis

from engine_worker.broker import BrokerUnavailable, GatewayBroker, WorkerBroker, keys
from engine_worker.protocol import StartStage, WorkerStarting, WorkerStatus
from inference import models_served
from inference.errors import NotFound, Overloaded
from inference.models_served import ModelCatalogue
from inference.runtime import Runtime
from tests.engine_worker.models import a_card, byte_tokenizer

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime()
    yield runtime
    await runtime.aclose()


async def test_one_model_that_cannot_be_read_leaves_the_others_served(runtime):
    good, bad, missing = (structs.replace(a_card(), model=f"{name}-{uuid.uuid4().hex}") for name in "gbm")
    bad = structs.replace(bad, tokenizer_sha256=uuid.uuid4().hex)
    missing = structs.replace(missing, tokenizer_sha256=uuid.uuid4().hex)
    workers = [
        WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
        for card in (bad, missing, good)
    ]
    catalogue = ModelCatalogue(runtime.broker, runtime.policy)
    server = aioredis.Redis.from_url(settings.REDIS_URL)
    try:
        await workers[0].register(bad, b"not a tokenizer")
        await workers[1].register(missing, byte_tokenizer().to_str().encode())
        await server.delete(keys.tokenizer_key(missing.tokenizer_sha256))
        await workers[2].register(good, byte_tokenizer().to_str().encode())
        assert (await catalogue.get(good.model)).card == good
        with pytest.raises(Overloaded, match="can't be read"):
            await catalogue.get(bad.model)
        with pytest.raises(NotFound):
            await catalogue.get(missing.model)
        names = {served.card.model for served in await catalogue.all()}
        assert good.model in names
        assert not names & {bad.model, missing.model}
    finally:
        await catalogue.aclose()
        for worker in workers:
            await server.delete(keys.model_prefix(worker.model) + "card")
            await worker.aclose()
        await server.aclose()


async def test_a_model_is_served_while_the_card_after_it_is_still_read(runtime):
    """A gateway's first requests come while it reads the cards: what it has read it answers for."""
    first, second = (structs.replace(a_card(), model=f"{name}-{uuid.uuid4().hex}") for name in "az")
    second = structs.replace(second, tokenizer_sha256=uuid.uuid4().hex)
    reading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(GatewayBroker):
        async def tokenizer_json(self, sha256: str) -> bytes:
            if sha256 == second.tokenizer_sha256:
                reading.set()
                await go_on.wait()
            return await super().tokenizer_json(sha256)

    workers = [
        WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
        for card in (first, second)
    ]
    broker = Slow(settings.REDIS_URL, timeout_s=5)
    catalogue = ModelCatalogue(broker, runtime.policy)
    try:
        for worker, card in zip(workers, (first, second), strict=True):
            await worker.register(card, byte_tokenizer().to_str().encode())
        waiting = asyncio.create_task(catalogue.get(second.model))
        async with asyncio.timeout(30):
            await reading.wait()
            assert (await catalogue.get(first.model)).card == first
            go_on.set()
            assert (await waiting).card == second
    finally:
        await catalogue.aclose()
        for worker in workers:
            await worker._redis.delete(keys.model_prefix(worker.model) + "card")
            await worker.aclose()
        await broker.aclose()


async def test_before_the_first_worker_has_come_any_model_is_only_away(runtime, monkeypatch):
    monkeypatch.setattr(models_served, "_REFRESH_S", 0.0)
    url = settings.REDIS_URL + ("&" if "?" in settings.REDIS_URL else "?") + "db=9"
    server = aioredis.Redis.from_url(url)
    broker = GatewayBroker(url, timeout_s=5)
    catalogue = ModelCatalogue(broker, runtime.policy)
    card = structs.replace(a_card(), model=f"m-{uuid.uuid4().hex}")
    worker = WorkerBroker(url, model=card.model, worker_id="w", timeout_s=5)
    try:
        await server.flushdb()
        with pytest.raises(Overloaded) as away:
            await catalogue.get(card.model)
        assert (away.value.code, away.value.retry_after_ms) == ("model_unavailable", 5000)
        await worker.register(card, byte_tokenizer().to_str().encode())
        with pytest.raises(NotFound):
            await catalogue.get("another")
        await worker.withdraw()
        assert await catalogue.all() == []
        for name in (card.model, "another"):
            with pytest.raises(NotFound):
                await catalogue.get(name)
    finally:
        await catalogue.aclose()
        await worker.aclose()
        await broker.aclose()
        await server.flushdb()
        await server.aclose()


@pytest.mark.parametrize(
    ("stage", "for_s", "words", "retry_after_ms"),
    [
        (StartStage.LOADING, 12.3, "is loading '.*', for 12 s so far", 5000),
        (StartStage.COMPILING, 20.4, "compiles its kernels, once .* a minute or two.* 20 s", 39_600),
        (StartStage.COMPILING, 200, "compiles its kernels, .* 200 s", 5000),
        ("of a newer worker", 3, "is loading", 5000),
    ],
)
async def test_while_its_worker_starts_who_asks_hears_what_that_is_at(
    runtime, stage, for_s, words, retry_after_ms
):
    model, other = (f"m-{uuid.uuid4().hex}" for _ in range(2))
    workers = [
        WorkerBroker(settings.REDIS_URL, model=name, worker_id="w", timeout_s=5) for name in (model, other)
    ]
    catalogue = ModelCatalogue(runtime.broker, runtime.policy)
    try:
        await workers[1].withdraw()
        await workers[1]._redis.sadd(keys.MODELS, other)  # so that what nobody serves is unknown
        await workers[0].starts(WorkerStarting(worker_id="w", model=model, stage=stage, for_s=for_s))
        with pytest.raises(Overloaded, match=words) as away:
            await catalogue.get(model)
        assert (away.value.code, away.value.retry_after_ms) == ("model_unavailable", retry_after_ms)
        with pytest.raises(NotFound, match="does not exist"):
            await catalogue.get(f"{model}-other")
    finally:
        await catalogue.aclose()
        for worker in workers:
            await worker.starts_no_more()
            await worker._redis.delete(keys.model_prefix(worker.model) + "withdrawn")
            await worker.aclose()


async def test_a_model_that_has_just_come_is_found_though_others_were_looked_up_before_it(
    runtime, monkeypatch
):
    monkeypatch.setattr(models_served, "_REFRESH_S", 3600.0)  # what is known stays good
    first, late = (structs.replace(a_card(), model=f"{name}-{uuid.uuid4().hex}") for name in "fl")
    tokenizer = byte_tokenizer().to_str().encode()
    workers = [
        WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
        for card in (first, late)
    ]
    catalogue = ModelCatalogue(runtime.broker, runtime.policy)
    try:
        await workers[0].register(first, tokenizer)
        await catalogue.get(first.model)
        await workers[1].register(late, tokenizer)
        await asyncio.sleep(models_served._REFRESH_UNKNOWN_S * 1.5)
        assert (await catalogue.get(late.model)).card == late
    finally:
        await catalogue.aclose()
        for worker in workers:
            await worker.withdraw()
            await worker.aclose()


async def test_a_model_that_has_had_no_worker_for_a_day_was_served_once(runtime):
    first, second = (structs.replace(a_card(), model=f"m-{uuid.uuid4().hex}") for _ in range(2))
    workers = [
        WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
        for card in (first, second)
    ]
    catalogue = ModelCatalogue(runtime.broker, runtime.policy)
    try:
        for worker, card in zip(workers, (first, second), strict=True):
            await worker.register(card, byte_tokenizer().to_str().encode())
        await workers[0]._redis.delete(keys.model_prefix(first.model) + "card")  # as its time lets it lapse
        with pytest.raises(NotFound, match=r"was served once.* no worker for a day\. GET /v1/models") as gone:
            await catalogue.get(first.model)
        assert gone.value.code == "model_not_found"
    finally:
        await catalogue.aclose()
        await workers[1]._redis.delete(keys.model_prefix(second.model) + "card")
        for worker in workers:
            await worker.aclose()


async def test_a_model_that_was_unloaded_is_unknown_though_the_operator_names_it(runtime, monkeypatch):
    """Between two workers it is only away, which is worth a retry; unloaded, nobody need ask again."""
    monkeypatch.setattr(models_served, "_REFRESH_S", 0.0)
    monkeypatch.setattr(models_served, "WORKER_ABSENCE_S", 0.0)
    card = structs.replace(a_card(), model=f"m-{uuid.uuid4().hex}")
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
    catalogues = [
        ModelCatalogue(runtime.broker, runtime.policy, expected=names) for names in ((), (card.model,))
    ]
    try:
        await worker.register(card, byte_tokenizer().to_str().encode())
        await worker.farewell()
        for catalogue in catalogues:
            with pytest.raises(Overloaded) as away:
                await catalogue.get(card.model)
            assert away.value.code == "model_unavailable"
        await worker.withdraw()
        for catalogue in catalogues:
            with pytest.raises(NotFound) as gone:
                await catalogue.get(card.model)
            assert gone.value.code == "model_not_found"
            assert card.model not in {served.card.model for served in await catalogue.all()}
            for has_begun in (False, True):
                with pytest.raises(NotFound):
                    catalogue.refuse_without_worker(card.model, has_begun=has_begun)
        monkeypatch.setattr(models_served, "WORKER_ABSENCE_S", 30.0)
        await worker.register(card, byte_tokenizer().to_str().encode())
        for catalogue in catalogues:
            assert (await catalogue.get(card.model)).card == card
    finally:
        for catalogue in catalogues:
            await catalogue.aclose()
        await worker._redis.delete(keys.model_prefix(card.model) + "card")
        await worker.aclose()


class Clock:
    """Stands still unless it is moved."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def silent_worker() -> AsyncIterator[Callable[[float], Awaitable[str]]]:
    """A worker of a model that last said so many seconds ago that it is there: its model."""
    card = structs.replace(a_card(), model=f"m-{uuid.uuid4().hex}")
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=5)
    card_key = keys.model_prefix(card.model) + "card"

    async def silent_for(silent_s: float) -> str:
        await worker.register(card, byte_tokenizer().to_str().encode())
        await worker._redis.pexpire(card_key, round((keys.CARD_TTL_S - silent_s) * 1000))
        return card.model

    yield silent_for
    await worker._redis.delete(card_key)
    await worker.aclose()


@pytest.mark.parametrize("has_just_started", [True, False])
async def test_a_worker_is_waited_for_thirty_seconds_from_its_last_sign_of_life(
    runtime, silent_worker, has_just_started
):
    """By the server's clock: whoever looks since when, and though its key outlives it by 15 s."""
    catalogue = ModelCatalogue(runtime.broker, runtime.policy, clock=(clock := Clock()))
    try:
        if not has_just_started:
            assert await catalogue.get(await silent_worker(0))
        for silent_s, is_refused in ((28.0, False), (30.5, True), (3600.0, True), (1.0, False)):
            name = await silent_worker(silent_s)
            clock.now_s += 2.0
            await catalogue.look()
            if is_refused:
                with pytest.raises(Overloaded) as away:
                    catalogue.refuse_without_worker(name)
                assert away.value.code == "model_unavailable"
                with pytest.raises(Overloaded):
                    await catalogue.get(name)
            else:
                catalogue.refuse_without_worker(name)
                assert (await catalogue.get(name)).card.model == name
    finally:
        await catalogue.aclose()


async def test_when_redis_was_away_workers_have_a_while_to_say_that_they_are_there(runtime, silent_worker):
    class Away(GatewayBroker):
        is_away = False

        async def workers(self) -> list[WorkerStatus]:
            if self.is_away:
                raise BrokerUnavailable
            return await super().workers()

    broker = Away(settings.REDIS_URL, timeout_s=5)
    catalogue = ModelCatalogue(broker, runtime.policy, clock=(clock := Clock()))
    try:
        name = await silent_worker(0)
        await catalogue.look()
        broker.is_away = True
        name = await silent_worker(60)
        clock.now_s += 60
        await catalogue.look()
        catalogue.refuse_without_worker(name)  # what Redis does not answer is no look
        broker.is_away = False
        for waited_s, is_refused in ((1, False), (14, False), (2, True)):
            clock.now_s += waited_s
            await catalogue.look()
            if is_refused:
                with pytest.raises(Overloaded):
                    catalogue.refuse_without_worker(name)
            else:
                catalogue.refuse_without_worker(name)
    finally:
        await catalogue.aclose()
        await broker.aclose()
