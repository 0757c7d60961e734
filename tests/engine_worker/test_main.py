"""The shipped process with a real (tiny) model: from the queue through the engine and back, and across kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from engine_worker.__main__ import main
from engine_worker.broker import GatewayBroker
from engine_worker.protocol import SamplingParams
from tests.engine_worker.broker.driving import put, until, usage_events
from tests.engine_worker.models import VOCAB_SIZE, greedy, make_tiny_model, reference

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = [7, 77, 177]


def serve(model: str, directory: Path, redis_url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "engine_worker",
            "--model",
            f"{model}={directory}",
            "--lease-ms",
            "2000",
            "--threads",
            "1",
        ],
        cwd=ROOT,
        env=os.environ | {"REDIS_URL": redis_url},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


async def tokens(gateway: GatewayBroker, model: str, request_id: str) -> list[int]:
    return [token for chunk in await gateway.read_log(model, request_id) for token in chunk.token_ids]


@pytest.mark.timeout(600)
async def test_a_model_is_served_and_survives_kill_9_and_a_drain(gateway, make, model, redis_url, tiny):
    expected = greedy(reference(tiny), PROMPT, 80)
    sampling = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    await put(gateway, make("r1", prompt_token_ids=PROMPT, sampling=sampling, deadline_ms=1_300_000))
    first = serve(model, tiny, redis_url)
    second = None
    try:

        async def is_running() -> bool:
            return (await gateway.request_state(model, "r1")).tokens >= 5

        await until(is_running, 300)  # kernels may have to be compiled first
        first.kill()
        second = serve(model, tiny, redis_url)

        async def is_finished() -> bool:
            return (await gateway.request_state(model, "r1")).state == "finished"

        await until(is_finished, 90)
        assert await tokens(gateway, model, "r1") == expected
        (event,) = await usage_events(redis_url, model)
        assert (event.prompt_tokens, event.completion_tokens) == (3, 80)

        (card,) = [card for card in await gateway.model_cards() if card.model == model]
        assert (card.vocab_size, card.context_length, card.architecture) == (
            VOCAB_SIZE,
            256,
            "LlamaForCausalLM",
        )
        assert await gateway.tokenizer_json(card.tokenizer_sha256) == (tiny / "tokenizer.json").read_bytes()

        second.send_signal(signal.SIGTERM)
        _, log = second.communicate(timeout=30)
        assert second.returncode == 0, log
    finally:
        for process in (first, second):
            if process:
                process.kill()
                process.communicate()


@pytest.fixture
def own_logging() -> Iterator[None]:
    """`main` configures logging for its process, which here is everybody's."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("missing", ["directory", "tokenizer.json"])
def test_a_directory_that_can_not_be_served_is_said_in_one_line(tmp_path, monkeypatch, capsys, missing):
    directory = tmp_path / "nowhere"
    if missing == "tokenizer.json":
        (make_tiny_model(directory) / missing).unlink()
    monkeypatch.setattr(sys, "argv", ["engine_worker", "--model", f"m={directory}", "--threads", "1"])
    assert main() == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("engine_worker: ")
    assert "nowhere" in last
