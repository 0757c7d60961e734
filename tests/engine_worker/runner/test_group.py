"""One model over two processes: the tokens of one, and the end of both when one dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_worker.runner import group
from tests.engine_worker.models import greedy, make_tiny_model, reference
from tests.engine_worker.runner.group_member import ASKED
from tests.engine_worker.runner.test_lean_model import weighted

MEMBER = Path(__file__).with_name("group_member.py")


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-addr", "127.0.0.1", "--master-port", str(port), str(MEMBER), *map(str, arguments),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip


def printed(run: subprocess.CompletedProcess[str]) -> list[list[list[int]]]:
    """By model."""
    lines = [line for line in run.stdout.splitlines() if line.startswith("[[")]  # the rest is the log
    return [json.loads(line) for line in lines]


FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
}


@pytest.mark.timeout(900)
def test_two_processes_make_the_tokens_of_one(tmp_path):
    """One start for all families: it takes longer than what they compute."""
    expected = {}
    for family, changes in FAMILIES.items():
        model = reference(weighted(make_tiny_model(tmp_path / family, family, **changes)))
        expected[family] = [greedy(model, list(item.prompt_token_ids), 20) for item in ASKED]
    well = torchrun(tmp_path / "never", *(tmp_path / family for family in FAMILIES))
    assert dict(zip(FAMILIES, printed(well), strict=False)) == expected, well.stderr[-3000:]
    assert well.returncode == 0, well.stderr[-3000:]


@pytest.mark.timeout(900)
def test_a_process_that_dies_in_a_step_ends_the_group(tmp_path):
    """Nobody is left waiting for it."""
    ill = torchrun(tmp_path / "die", make_tiny_model(tmp_path / "model"))
    assert len(printed(ill)) == 1
    assert ill.returncode != 0


def test_a_process_that_torchrun_did_not_start_is_alone():
    assert not group.join({}, device="cpu")
    assert (group.size(), group.is_leader(), group.share(3, "heads"), group.least(7)) == (1, True, 3, 7)
