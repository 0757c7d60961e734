"""The GPU benchmark where there is none: that it says so, that its parts run, that it measures real decoding."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.engine_worker.models import greedy

pytest.importorskip("triton", reason="Triton exists for Linux only")

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import models
from benchmarks.gpu.report import Report
from benchmarks.gpu.stepper import random_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the script itself runs on a GPU")


def test_script_without_a_gpu_says_so():
    done = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu.sh")],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "no CUDA device\n")


def test_every_part_runs_and_the_table_comes_last(capsys):
    assert benchmark.main(["--device", "cpu", "--tiny"]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert table[0].split() == ["what", "case", "measured", "compared"]
    measured = {line.split("  ")[0] for line in table[2:]}
    assert measured == {
        "copy",
        "product",
        "decode attention, triton",
        "prefill attention, triton",
        "KV write",
        "decode, tiny",
        "first token, tiny",
    }


def test_what_is_timed_is_greedy_decoding():
    model = random_model(models.configs(tiny=True)["tiny"], CPU, torch.float32)
    given = models.prompts(model, 3, 7)
    # A budget below the prompts' length: chunks.
    tokens = list(models.generate(model, given, 6, budget=5, block_size=4))[1:]
    model.set_attn_implementation("eager")
    want = [greedy(model, prompt, 6) for prompt in given.tolist()]
    assert torch.stack(tokens, dim=1).tolist() == want


def test_a_part_that_fails_is_a_row_and_the_rest_goes_on():
    report = Report(budget_s=1000)

    def fail():
        raise RuntimeError("out of\nmemory")

    report.part("theirs", fail, required=False)
    assert not report.failed
    report.part("ours", fail)
    assert report.failed
    assert "ours" in report.table()
    assert "RuntimeError: out of memory" in report.table()
    late = Report(budget_s=-1)
    late.part("late", fail)
    assert not late.failed
    assert late.rows == [("late", "", "skipped", "no time left")]
