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


def printed(run: subprocess.CompletedProcess[str]) -> object:
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("[[")]  # the rest is the log
    return json.loads(line)


@pytest.mark.timeout(900)
def test_two_processes_make_the_tokens_of_one_and_end_together(tmp_path):
    model_dir = make_tiny_model(tmp_path / "model")
    model = reference(model_dir)
    expected = [greedy(model, list(item.prompt_token_ids), 20) for item in ASKED]
    well = torchrun(model_dir, tmp_path / "never")
    assert well.returncode == 0, well.stderr[-3000:]
    assert printed(well) == expected
    # A process that dies in the middle of a step: nobody is left waiting for it.
    ill = torchrun(model_dir, tmp_path / "die")
    assert printed(ill) == expected
    assert ill.returncode != 0


def test_a_process_that_torchrun_did_not_start_is_alone():
    assert not group.join({}, device="cpu")
    assert (group.size(), group.is_leader(), group.share(3, "heads"), group.least(7)) == (1, True, 3, 7)
