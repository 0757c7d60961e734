"""The worker as a process: signals, exit codes, log lines, sudden death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_worker.broker import GatewayBroker
from engine_worker.process import _SAME_STOP_S
from engine_worker.protocol import SamplingParams, StartStage
from tests.engine_worker.broker.driving import put, until, usage_events
from tests.engine_worker.scripted_engine import expected_output

ROOT = Path(__file__).resolve().parent.parent.parent
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(model: str, redis_url: str) -> Iterator[Spawn]:
    processes: list[subprocess.Popen[str]] = []

    def build(**environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_worker.scripted_worker", model],
            cwd=ROOT,
            env=os.environ | {"REDIS_URL": redis_url} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield build
    for process in processes:
        process.kill()
        process.communicate()


def tokens_reached(gateway: GatewayBroker, model: str, request_id: str, count: int):
    async def check() -> bool:
        return (await gateway.request_state(model, request_id)).tokens >= count

    return check


def is_finished(gateway: GatewayBroker, model: str, request_id: str):
    async def check() -> bool:
        return (await gateway.request_state(model, request_id)).state == "finished"

    return check


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_zero(spawn, gateway, make, model, number):
    process = spawn()
    request = make("r1", prompt_token_ids=[104, 105], sampling=SamplingParams(max_tokens=40))
    await put(gateway, request)
    await until(tokens_reached(gateway, model, "r1", 3), 30)
    process.send_signal(number)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0, log
    assert (await gateway.request_state(model, "r1")).finish.reason == "length"
    for event in (
        "worker_started",
        "request_claimed",
        "worker_draining",
        "request_finished",
        "worker_stopped",
    ):
        assert log.count(f"event={event}") == 1, log
    # Neither prompt nor answer ever reaches a log.
    answer = "".join(map(chr, expected_output([104, 105], 0, 40)))
    assert answer[:8] not in log
    assert "104, 105" not in log


async def test_a_second_signal_hands_back_at_once(spawn, gateway, make, model):
    process = spawn()
    await put(gateway, make("r1", sampling=SamplingParams(max_tokens=100_000)))
    await until(tokens_reached(gateway, model, "r1", 3), 30)
    process.send_signal(signal.SIGTERM)

    async def drains() -> bool:
        return any(status.draining for status in await gateway.workers() if status.model == model)

    await until(drains)
    await asyncio.sleep(_SAME_STOP_S)  # one that comes at once with the first is the same
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    state = await gateway.request_state(model, "r1")
    assert (state.state, state.attempts) == ("queued", 0)


async def test_signals_that_come_together_are_one(spawn, gateway, make, model):
    """From a supervisor, and from its end or the terminal: what runs is finished all the same."""
    process = spawn()
    await put(gateway, make("r1", sampling=SamplingParams(max_tokens=100)))
    await until(tokens_reached(gateway, model, "r1", 3), 30)
    process.send_signal(signal.SIGTERM)
    while "event=worker_draining" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert (await gateway.request_state(model, "r1")).finish.completion_tokens == 100


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
async def test_a_model_whose_worker_a_person_ends_goes_with_it(spawn, gateway, model, number, stays):
    """A supervisor's SIGTERM is followed by a start; at a terminal nobody starts it again."""
    process = spawn()
    while "event=worker_started" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    known = await gateway.known_models()
    assert (model in {card.model for card in known.cards}) == stays
    assert (model in known.withdrawn) != stays


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_ends_it_at_once(spawn, number):
    """Also while something (a compiler) lets no Python code run."""
    process = spawn(SCRIPTED_BUSY="1")
    assert any("event=starting" in line for line in process.stderr)
    process.send_signal(number)
    assert process.wait(timeout=20) == -number


async def test_it_is_known_while_it_starts(spawn, gateway, model):
    process = spawn(SCRIPTED_BUSY="1")
    while "event=starting" not in process.stderr.readline():
        assert process.poll() is None
    assert (await gateway.starting())[model].stage == StartStage.LOADING


async def test_kill_9_in_mid_stream_changes_nothing_for_the_client(spawn, gateway, make, model, redis_url):
    first = spawn(SCRIPTED_LEASE_MS="1000")
    request = make("r1", sampling=SamplingParams(max_tokens=150, seed=9))
    await put(gateway, request)
    await until(tokens_reached(gateway, model, "r1", 10), 30)
    first.kill()
    first.wait()
    spawn(SCRIPTED_LEASE_MS="1000")
    await until(is_finished(gateway, model, "r1"), 30)
    log = await gateway.read_log(model, "r1")
    assert [token for chunk in log for token in chunk.token_ids] == expected_output(
        request.prompt_token_ids, 9, 150
    )
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts) == (150, 2)
