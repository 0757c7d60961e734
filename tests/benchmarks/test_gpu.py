"""The GPU benchmark where there is none: that it says so, that its parts run, that it measures real decoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.report import Report
from tests.engine_worker.test_imports import PRODUCT

ROOT = Path(__file__).resolve().parents[2]

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


def test_it_needs_neither_servers_nor_their_clients():
    """Everything that the script imports, tests included."""
    blocked = PRODUCT | {"msgspec", "redis", "structlog", "llguidance", "hypothesis", "numba", "psycopg"}
    modules = [
        "benchmarks.gpu.__main__",
        "tests.engine_worker.attention.test_triton_kernels",
        "tests.engine_worker.attention.test_cuda",
        "tests.engine_worker.runner.test_gpu_steps",
    ]
    script = (ROOT / "benchmarks" / "gpu.sh").read_text()
    assert all(module.replace(".", "/") + ".py" in script for module in modules[1:])
    # Not the blocker of test_imports: transformers asks what there is, and must be told that there is nothing.
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    code += f"for name in {modules!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
        "choice, tiny",
        "first token, tiny",
    }


def test_a_part_that_hangs_ends_in_time_with_the_table():
    code = (
        "import threading\nfrom benchmarks.gpu.report import Report\n"
        "report = Report(budget_s=1000)\nreport.add('copy', '1 GiB', '3 GB/s')\n"
        "with report.ended_after(0.2): report.part('decode', threading.Event().wait)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    rows = [line.split()[:2] for line in done.stdout.split("\n\n")[-1].splitlines()]
    assert ["copy", "1"] in rows
    assert ["decode", "FAILED"] in rows


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
