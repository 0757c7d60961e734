"""Models loaded on and unloaded from a real worker process, by REST and by the admin's pages: done, refused, lost."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client

from engine_worker.broker import ControlBroker, GatewayBroker
from engine_worker.broker.commands import ProcessStatus, Refusal
from engine_worker.protocol import GenerateRequest, SamplingParams
from inference.models import CommandAction, CommandState, WorkerCommand
from inference.services import worker_commands
from inference.services.worker_commands import CommandUnderway, command_worker, settle_commands
from tenants.models import AuditEntry
from tests.e2e.site import ROOT
from tests.engine_worker.broker.driving import until as eventually
from tests.engine_worker.models import greedy, make_tiny_model, reference
from tests.factories import TEST, make_key, make_operator, make_tenant, make_user

TOKEN = "a program of the operator's"
PROMPT = [7, 77, 177]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: make_tiny_model(root / name, seed=seed) for seed, name in enumerate(("one", "two"))}
    found["huge"] = make_tiny_model(root / "huge", seed=3)
    header = json.dumps({"w": {"dtype": "F16", "shape": [1 << 40, 1 << 10], "data_offsets": [0, 0]}}).encode()
    (found["huge"] / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return found


@pytest.fixture(scope="module")
def process(places: dict[str, Path]) -> Iterator[str]:
    """A real one, that serves `one`; its id."""
    worker_id = f"w-{uuid.uuid4().hex}"
    argv = [sys.executable, "-m", "engine_worker", "--model", f"{worker_id}-one={places['one']}"]
    argv += ["--worker-id", worker_id, "--max-models", "2", "--threads", "1", "--kernels", "torch"]
    argv += ["--precision", "fp32", "--kv-cache-memory", str(8 << 20)]
    running = subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"REDIS_URL": settings.REDIS_URL})
    try:
        until(lambda: worker_id in alive(), 300)
        yield worker_id
    finally:
        running.terminate()
        running.wait(60)


def until(condition: Callable[[], Any], timeout_s: float = 120) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
    return found


async def _with_control(work: Callable[[ControlBroker], Any]) -> Any:
    control = ControlBroker(settings.REDIS_URL, timeout_s=10)
    try:
        return await work(control)
    finally:
        await control.aclose()


def alive() -> dict[str, ProcessStatus]:
    found = asyncio.run(_with_control(lambda control: control.processes()))
    return {process.worker_id: process for process in found}


@pytest.fixture
def idle_process() -> Iterator[str]:
    """One that lives and takes nothing."""
    status = ProcessStatus(
        worker_id=f"idle-{uuid.uuid4().hex}", started_at_ms=1, updated_at_ms=1, max_models=2, models=["m"]
    )
    asyncio.run(_with_control(lambda control: control.heartbeat(status)))
    yield status.worker_id
    asyncio.run(_with_control(lambda control: control.farewell(status.worker_id)))


class Program:
    """What the operator wrote: it knows the token."""

    def __init__(self) -> None:
        self._client = Client(headers={"Authorization": f"Bearer {TOKEN}"}, enforce_csrf_checks=True)

    def load(self, worker: str, model: str, source: object) -> Any:
        body = {"model": model, "source": str(source)}
        return self._client.post(f"/operator/workers/{worker}/models", body, content_type="application/json")

    def unload(self, worker: str, model: str) -> Any:
        return self._client.delete(f"/operator/workers/{worker}/models/{quote(model, safe='')}")

    def standing(self, answer: Any) -> dict[str, Any]:
        assert answer.status_code == 202, answer.content
        found: dict[str, Any] = self._client.get(f"/operator/commands/{answer.json()['id']}").json()
        return found

    def ended(self, answer: Any) -> dict[str, Any]:
        def has_ended() -> dict[str, Any] | None:
            found = self.standing(answer)
            return found if found["ended_at"] else None

        found: dict[str, Any] = until(has_ended)
        return found


@pytest.fixture
def program(settings: Any) -> Program:
    settings.OPERATOR_TOKEN = TOKEN
    return Program()


pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.timeout(600)
def test_a_model_is_loaded_served_refused_and_unloaded_after_what_runs(
    program: Program, process: str, places: dict[str, Path]
):
    one, two = f"{process}-one", f"{process}-two"
    done = program.ended(program.load(process, two, places["two"]))
    assert (done["state"], done["models_before"], done["models_after"]) == ("done", [one], [one, two])
    again = program.ended(program.load(process, two, places["two"]))
    assert (again["state"], again["models_after"]) == ("done", [one, two])
    full = program.ended(program.load(process, f"{process}-three", places["two"]))
    assert (full["state"], full["refusal"]) == ("refused", Refusal.FULL)

    # What runs is finished first, to its last token.
    expected = greedy(reference(places["one"]), PROMPT, 200)
    assert asyncio.run(_answered(one, while_it_runs=lambda: program.unload(process, one))) == expected
    (unloading,) = WorkerCommand.objects.filter(worker_id=process, action=CommandAction.UNLOAD)
    until(lambda: worker_commands.collect_answers() == {})
    unloading.refresh_from_db()
    assert (unloading.state, unloading.models_after) == (CommandState.DONE, [two])
    told = program.ended(program.unload(process, one))
    assert (told["state"], told["refusal"]) == ("refused", Refusal.NOT_SERVED)

    for name, refusal in (
        (places["one"].parent / "nowhere", Refusal.NOT_FOUND),
        (places["huge"], Refusal.MEMORY),
    ):
        refused = program.ended(program.load(process, one, name))
        assert (refused["state"], refused["refusal"]) == ("refused", refusal), refused
        assert refused["models_after"] == [two]
    # Nothing served: it can still be told to.
    assert program.ended(program.unload(process, two))["models_after"] == []
    assert alive()[process].models == []
    assert program.ended(program.load(process, one, places["one"]))["models_after"] == [one]

    entries = AuditEntry.unscoped.filter(target_public_id=unloading.public_id).order_by("id")
    assert [entry.action for entry in entries] == ["worker.unload_model", "worker.unload_done"]
    asked, ended = entries
    assert (asked.actor_label, asked.ip_address) == ("operator's program", "127.0.0.1")
    assert asked.before == {"worker": process, "models": [one, two]}
    assert ended.after == {"models": [two]}


async def _answered(model: str, *, while_it_runs: Callable[[], Any]) -> list[int]:
    gateway = GatewayBroker(settings.REDIS_URL, timeout_s=10)
    sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    request = GenerateRequest(
        request_id="r", model=model, tenant_id="t", tier="standard", tier_rank=1, prompt_token_ids=PROMPT,
        sampling=sampling, created_at_ms=0, deadline_ms=600_000, reply_channel="weir:live:nobody",
    )  # fmt: skip
    try:
        await gateway.enqueue(request, max_queued=9, max_queued_per_tenant=9)

        async def has_begun() -> bool:
            return (await gateway.request_state(model, "r")).tokens >= 3

        async def has_ended() -> bool:
            return (await gateway.request_state(model, "r")).state == "finished"

        await eventually(has_begun, 120)
        await asyncio.to_thread(_closing, while_it_runs)
        await eventually(has_ended, 120)
        return [token for chunk in await gateway.read_log(model, "r") for token in chunk.token_ids]
    finally:
        await gateway.aclose()


def _closing(work: Callable[[], Any]) -> None:
    try:
        work()
    finally:
        connections.close_all()


def test_a_command_whose_process_ends_is_lost_and_one_that_waits_is_not(idle_process: str):
    waits = command_worker(actor=TEST, worker_id=idle_process, action=CommandAction.UNLOAD, model="m")
    settle_commands()
    waits.refresh_from_db()
    assert waits.state == CommandState.OPEN
    asyncio.run(_with_control(lambda control: control.farewell(idle_process)))
    settle_commands()
    waits.refresh_from_db()
    assert (waits.state, waits.models_after) == (CommandState.LOST, None)
    assert (
        AuditEntry.unscoped.filter(action="worker.unload_lost", target_public_id=waits.public_id).count() == 1
    )
    settle_commands()
    assert AuditEntry.unscoped.filter(target_public_id=waits.public_id).count() == 2
    with pytest.raises(worker_commands.WorkerGone, match="No worker"):
        command_worker(actor=TEST, worker_id=idle_process, action=CommandAction.UNLOAD, model="m")


def test_of_the_same_command_at_once_there_is_one_and_another_is_a_conflict(
    idle_process: str, program: Program
):
    at_once, told = threading.Barrier(4), []

    def command() -> None:
        at_once.wait(30)
        _closing(lambda: told.append(program.load(idle_process, "new", "/models/new")))

    threads = [threading.Thread(target=command) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in told] == [202] * 4
    assert len({answer.json()["id"] for answer in told}) == 1
    (sent,) = asyncio.run(_with_control(lambda control: control.waiting(idle_process)))
    assert sent == told[0].json()["id"]
    other = program.unload(idle_process, "new")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "command_underway")
    with pytest.raises(CommandUnderway):
        command_worker(
            actor=TEST, worker_id=idle_process, action=CommandAction.LOAD, model="new", source="/models/other"
        )
    assert program.standing(told[0])["state"] == "waiting"


@pytest.mark.parametrize(
    ("model", "source", "param"),
    [("a{b}", "/m", "model"), ("a:b", "/m", "model"), ("a\0", "/m", "model"), ("m", "", "source"),
     ("m", "/a\0b", "source"), ("", "/m", "model"), ("m" * 201, "/m", "model")],
)  # fmt: skip
def test_what_no_model_can_be_called_is_refused(
    idle_process: str, program: Program, model: str, source: str, param: str
):
    answer = program.load(idle_process, model, source)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not WorkerCommand.objects.exists()


def test_a_worker_of_one_model_and_a_redis_that_is_away_are_told(program: Program, settings: Any):
    assert program.load("nobody", "m", "/m").json()["error"]["code"] == "worker_not_found"
    for absent in (uuid.uuid4(), "no-id-at-all"):
        answer = program._client.get(f"/operator/commands/{absent}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "command_not_found")
    settings.REDIS_URL = "redis://127.0.0.1:9/0"
    answer = program.load("nobody", "m", "/m")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
    assert not WorkerCommand.objects.exists()


def test_it_opens_to_operators_and_their_programs_alone(idle_process: str, settings: Any):
    address = f"/operator/workers/{idle_process}/models"
    body = {"model": "m", "source": "/m"}

    def asked(client: Client, **more: Any) -> int:
        status: int = client.post(address, body, content_type="application/json", **more).status_code
        assert client.get("/operator/workers", **more).status_code == (200 if status == 202 else status)
        return status

    tenants_key = make_key(make_tenant(), scopes=("admin",)).secret
    for settings.OPERATOR_TOKEN in (None, TOKEN):
        for bearer in ("", TOKEN + "x", tenants_key, "None"):
            assert asked(Client(), headers={"Authorization": f"Bearer {bearer}"}) == 403
    for person in (make_user(), make_user(is_staff=True)):
        browser = Client()
        browser.force_login(person)
        assert asked(browser) == 403
    assert not WorkerCommand.objects.exists()
    operator = Client(enforce_csrf_checks=True)
    operator.force_login(make_operator("rest@example.org"))
    for refused in (
        operator.post(address, body, content_type="application/json"),
        operator.post("/operator/live"),
        operator.delete(f"{address}/m"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_failed")
    assert operator.post("/admin/live/load/").headers["Content-Type"].startswith("text/html"), (
        "a page for people"
    )
    operator.get("/admin/live/load/?worker=w")
    told = operator.post(
        address,
        body,
        content_type="application/json",
        headers={"X-CSRFToken": operator.cookies["csrftoken"].value},
    )
    assert (told.status_code, told.json()["asked_by"]) == (202, "rest@example.org")
    assert idle_process in [one["worker_id"] for one in operator.get("/operator/workers").json()["processes"]]


def test_the_live_page_commands_and_tells_what_became_of_it(idle_process: str):
    staff, operator = Client(), Client()
    staff.force_login(make_user(is_staff=True))
    operator.force_login(make_operator())
    load, unload = (
        f"/admin/live/load/?worker={idle_process}",
        f"/admin/live/unload/?worker={idle_process}&model=m",
    )
    page = operator.get("/admin/live/").content.decode()
    assert "1 of 2" in page
    for link in (load, unload):
        assert link.replace("&", "&amp;") in page
        assert link.replace("&", "&amp;") not in staff.get("/admin/live/").content.decode()
        for answer in (staff.get(link), staff.post(link, {"model": "x", "source": "/x"})):
            assert answer.status_code == 403
    assert not WorkerCommand.objects.exists()
    assert "Unload m?" in operator.get(unload).content.decode()
    wrong = operator.post(load, {"model": "a{b", "source": "/m"}).content.decode()
    assert "no braces" in wrong
    page = operator.post(load, {"model": "<b>x", "source": "/m"}, follow=True).content.decode()
    assert "Told: load &lt;b&gt;x on" in page
    assert "<b>x" not in page
    assert ">waiting<" in page
    conflict = f"/admin/live/unload/?worker={idle_process}&model=%3Cb%3Ex"
    assert "has not ended. Nothing was changed." in operator.post(conflict, follow=True).content.decode()
    (command,) = WorkerCommand.objects.all()
    command.state, command.outcome, command.ended_at = (
        CommandState.REFUSED,
        "It does not fit.",
        command.created_at,
    )
    command.save()
    page = operator.get("/admin/live/").content.decode()
    assert ">refused<" in page
    assert "It does not fit." in page
    gone = "/admin/live/unload/?worker=gone&model=m"
    assert (
        "No worker gone is alive. Nothing was changed." in operator.post(gone, follow=True).content.decode()
    )
