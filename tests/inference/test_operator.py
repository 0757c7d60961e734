"""The operator's live state and the command for dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import uuid
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils.html import escape

from engine_worker.broker import GatewayBroker, Held, WorkerBroker, keys
from engine_worker.protocol import GenerateRequest, SamplingParams, StartStage, WorkerStarting
from tenants.models import AuditEntry
from tests.engine_worker.broker.driving import card, publish, status, tokens
from tests.factories import make_key, make_operator, make_tenant, make_user


@pytest.fixture
def dead() -> Iterator[tuple[str, str]]:
    """A model with one dead and one waiting request, and a worker."""
    model = f"operated-{uuid.uuid4().hex}"

    async def prepare() -> None:
        gateway = GatewayBroker(settings.REDIS_URL, timeout_s=5)
        worker = WorkerBroker(settings.REDIS_URL, model=model, worker_id=f"w-{model}", timeout_s=5)
        await worker.register(card(model), b"{}")
        told = status(worker, output_tokens=900, drafted_tokens=80, accepted_tokens=60)
        await worker.heartbeat(told, tokenizer_sha256=card(model).tokenizer_sha256)
        await gateway.enqueue(request(model, "r1"), max_queued=9, max_queued_per_tenant=9, max_attempts=1)
        (claim,) = await worker.claim(1)
        await publish(worker, claim, tokens(claim, 0, 7))
        await worker.release(
            [Held("r1", claim.epoch)], failed=True, code="engine_failed", message="It broke."
        )
        await gateway.enqueue(request(model, "r2"), max_queued=9, max_queued_per_tenant=9)
        await worker.aclose()
        await gateway.aclose()

    async def forget() -> None:
        worker = WorkerBroker(settings.REDIS_URL, model=model, worker_id=f"w-{model}", timeout_s=5)
        await worker.farewell()
        async with worker._redis as client:
            await client.srem("weir:models", model)
            async for key in client.scan_iter(match=f"weir:[{{]m:{model}[}}]:*"):
                await client.unlink(key)
        await worker.aclose()

    asyncio.run(prepare())
    yield model, "r1"
    asyncio.run(forget())


def request(model: str, request_id: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=model,
        tenant_id="t1",
        tier="standard",
        tier_rank=1,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        created_at_ms=0,
        deadline_ms=60_000,
        reply_channel=f"weir:live:{model}",
    )


@pytest.mark.django_db
def test_staff_see_queues_workers_and_the_dead(dead):
    model, request_id = dead
    browser = Client()
    browser.force_login(make_operator())
    page = browser.get("/operator/live")
    assert page.status_code == 200
    state = page.json()
    (queue,) = [queue for queue in state["models"] if queue["model"] == model]
    assert (queue["running"], queue["delayed"], queue["dead"]) == (0, 0, 1)
    (tier,) = queue["tiers"]
    assert (tier["rank"], tier["waiting"]) == (1, 1)
    assert tier["tenants"][0].keys() == {"tenant_id", "waiting", "oldest_ms", "counter"}
    (worker,) = [worker for worker in state["workers"] if worker["model"] == model]
    assert worker["kv_blocks_used"] == 4
    (letter,) = [letter for letter in state["dead_letters"] if letter["model"] == model]
    assert (letter["request_id"], letter["error_code"]) == (request_id, "engine_failed")


@pytest.mark.django_db
def test_nobody_else_sees_it():
    browser = Client()
    bearer = {"Authorization": f"Bearer {make_key(make_tenant()).secret}"}
    assert browser.get("/operator/live", headers=bearer).status_code == 403
    browser.force_login(make_user())
    refused = browser.get("/operator/live")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "staff_only"
    changed = browser.post("/operator/live")
    assert (changed.status_code, changed.headers["Allow"]) == (405, "GET, HEAD")
    assert changed.json()["error"]["code"] == "method_not_allowed"


def run(*arguments: str, fails: str = "") -> str:
    """What it says. `fails`: how its error begins, where it has to end with one."""
    out = io.StringIO()
    with pytest.raises(CommandError, match=fails) if fails else contextlib.nullcontext():
        call_command("dead_letters", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_the_command_lists_queues_again_and_drops(dead):
    model, request_id = dead
    listed = run("list", "--model", model)
    assert request_id in listed
    assert "engine_failed: It broke." in listed
    for arguments in (("r2", "nope", "--model", model), ("--model", model, "r2", "nope")):
        assert run("requeue", *arguments, fails="2 of 2 requests were left").splitlines() == [
            "r2: is not dead",
            "nope: unknown, or its day is over",
        ]
    assert run("requeue", "--all", "--model", model) == f"{request_id}: done\n"
    assert run("list", "--model", model) == f"{model}: none is dead\n"
    assert run("requeue", "--all", "--model", model) == f"{model}: none is dead\n"
    said = run("drop", request_id, "--model", model, fails="1 of 1 requests were left")
    assert said == f"{request_id}: is not dead\n"


@pytest.mark.parametrize(
    "arguments", [("requeue", "r1"), ("drop", "--model", "m"), ("drop", "r1", "--all", "--model", "m")]
)
def test_the_command_asks_for_what_it_needs(arguments):
    with pytest.raises(CommandError):
        run(*arguments)


LIVE = "/admin/live/"


def on_dead(verb: str, letter: dict[str, str]) -> str:
    return f"{LIVE}dead-letter/?verb={verb}&{urlencode(letter)}"


@pytest.mark.django_db
def test_the_live_page_names_what_waits_and_acts_on_the_dead(dead):
    model, request_id = dead
    tenant = make_tenant("<b>Ministry</b>")
    asyncio.run(_given_to(model, request_id, str(tenant.public_id)))
    browser = Client()
    browser.force_login(make_operator())
    page = browser.get(LIVE).content.decode()
    assert model in page
    assert "engine_failed: It broke." in page
    assert "900<br><small>75 % of guesses right</small>" in page
    assert "&lt;b&gt;Ministry" in page
    assert "<b>Ministry" not in page
    letter = {"model": model, "request_id": request_id, "tenant": str(tenant.public_id)}
    elsewhere = {**letter, "tenant": str(make_tenant().public_id)}
    assert "is unknown" in browser.post(on_dead("drop", elsewhere), follow=True).content.decode()
    assert browser.post(on_dead("steal", letter)).status_code == 404
    assert escape(on_dead("requeue", letter)) in page
    assert f"Drop {request_id}?" in browser.get(on_dead("drop", letter)).content.decode()
    assert browser.get(on_dead("requeue", letter)).status_code == 404
    done = browser.post(on_dead("requeue", letter), follow=True).content.decode()
    assert f"{request_id} is queued again" in done
    again = browser.post(on_dead("drop", letter), follow=True).content.decode()
    assert f"{request_id} is not dead" in again
    (entry,) = AuditEntry.objects.filter(tenant=tenant, action__startswith="dead_letter.")
    assert (entry.action, entry.after) == (
        "dead_letter.requeue",
        {"model": model, "request_id": request_id},
    )


@pytest.mark.django_db
def test_the_live_page_shows_queues_that_are_served_or_in_which_something_waits(dead):
    model, _ = dead
    browser = Client()
    browser.force_login(make_operator())

    def heading() -> str | None:
        found = re.search(f"<h3>{model} <small>(.*?)</small>", browser.get(LIVE).content.decode())
        return found[1] if found else None

    assert heading() == "0 running, 0 put off, 1 dead"
    asyncio.run(_without_worker(model))
    assert heading() == "no worker, 0 running, 0 put off, 1 dead"
    asyncio.run(_without_worker(model, cancelled="r2"))
    assert heading() is None


@pytest.mark.django_db
def test_the_live_page_says_which_workers_are_on_their_way(dead):
    model, _ = dead
    browser = Client()
    browser.force_login(make_operator())
    asyncio.run(_start_others(model))
    (told,) = [each for each in browser.get("/operator/live").json()["starting"] if each["model"] == model]
    assert (told["worker_id"], told["stage"], told["for_s"]) == ("w-new", "compiling", 20)
    page = browser.get(LIVE).content.decode()
    assert f"w-new starts to serve {model}: it compiles its kernels" in page
    asyncio.run(_start_others(model, as_the_one_that_serves=True))
    assert f"starts to serve {model}" not in browser.get(LIVE).content.decode()


async def _start_others(model: str, *, as_the_one_that_serves: bool = False) -> None:
    name = f"w-{model}" if as_the_one_that_serves else "w-new"
    worker = WorkerBroker(settings.REDIS_URL, model=model, worker_id=name, timeout_s=5)
    await worker.starts(WorkerStarting(worker_id=name, model=model, stage=StartStage.COMPILING, for_s=20))
    await worker.aclose()


async def _without_worker(model: str, cancelled: str = "") -> None:
    worker = WorkerBroker(settings.REDIS_URL, model=model, worker_id=f"w-{model}", timeout_s=5)
    gateway = GatewayBroker(settings.REDIS_URL, timeout_s=5)
    await worker.farewell()
    if cancelled:
        await gateway.cancel(model, cancelled)
    await gateway.aclose()
    await worker.aclose()


async def _given_to(model: str, request_id: str, tenant_id: str) -> None:
    """As if that tenant had sent it."""
    gateway = GatewayBroker(settings.REDIS_URL, timeout_s=5)
    await gateway._redis.hset(keys.model_prefix(model) + "req:" + request_id, "tenant", tenant_id)
    await gateway.aclose()


@pytest.mark.django_db
def test_only_staff_see_the_live_page_and_only_superusers_act():
    assert Client().get(LIVE).status_code == 302
    person, staff = Client(), Client()
    person.force_login(make_user())
    assert person.get(LIVE).status_code == 302
    staff.force_login(make_user(is_staff=True))
    assert staff.get(LIVE).status_code == 200
    url = on_dead("drop", {"model": "m", "request_id": "r", "tenant": str(make_tenant().public_id)})
    assert staff.post(url).status_code == 403
    assert person.post(url).status_code == 302
    assert not AuditEntry.unscoped.filter(action__startswith="dead_letter.").exists()
