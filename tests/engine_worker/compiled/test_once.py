"""Several workers that start at once on a new machine: one compiles, and nobody waits for one that died or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

pytest.importorskip("numba")

from engine_worker import starting
from engine_worker.compiled import once
from engine_worker.compiled.once import compiling
from tests.e2e.site import ROOT

HOLDS = (
    "import sys, pathlib; from engine_worker.compiled.once import compiling\n"
    "with compiling(pathlib.Path(sys.argv[1])): print('holds', flush=True); sys.stdin.read()"
)


def compile_at_once(directory: Path, start: Callable[[Callable[[], None]], None]) -> int:
    """How many of six compile. `start` runs what a process does between its start and its kernels."""
    at_once, compiled = threading.Barrier(6), []

    def kernels() -> None:
        if not (directory / "code").exists():
            compiled.append(1)
            slowly.wait(0.05)
            (directory / "code").touch()

    def run() -> None:
        at_once.wait(30)
        start(kernels)

    slowly = threading.Event()
    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return len(compiled)


def test_one_of_many_compiles(tmp_path: Path):
    def guarded(kernels: Callable[[], None]) -> None:
        with compiling(tmp_path):
            kernels()

    assert compile_at_once(tmp_path, guarded) == 1
    with structlog.testing.capture_logs() as told, compiling(tmp_path):
        pass
    assert told == [], "what is compiled is no reason to wait, or to speak"


def test_another_checkout_and_a_source_that_was_touched_compile_for_themselves(tmp_path, monkeypatch):
    """As numba does: it finds its code by the source's path, time and size."""
    checkouts = [tmp_path / "one", tmp_path / "other"]
    for checkout in checkouts:
        checkout.mkdir()
        (checkout / "kernel.py").write_text("same")

    def told() -> list[str]:
        with structlog.testing.capture_logs() as lines, compiling(tmp_path / "cache"):
            pass
        return [line["event"] for line in lines]

    for checkout in checkouts:
        monkeypatch.setattr(once, "_SOURCES", checkout)
        assert told() == ["kernels_compiling", "kernels_ready"]
        assert told() == []
    os.utime(checkouts[1] / "kernel.py", (1, 1))
    assert told() == ["kernels_compiling", "kernels_ready"]
    monkeypatch.setattr(once, "_SOURCES", checkouts[0])
    assert told() == []


def test_control_without_the_lock_several_do(tmp_path: Path):
    assert compile_at_once(tmp_path, lambda kernels: kernels()) > 1


def test_the_lock_of_one_that_was_killed_is_free_and_of_one_that_hangs_is_not_waited_for(tmp_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        while "holds" not in holder.stdout.readline():
            assert holder.poll() is None
        with structlog.testing.capture_logs() as told, compiling(tmp_path, patience_s=0.3):
            pass
        events = [line["event"] for line in told]
        assert events == [
            "kernels_compiled_by_another", "kernels_waited_in_vain", "kernels_compiling", "kernels_ready",
        ]  # fmt: skip
    finally:
        holder.kill()
        holder.communicate()
    for done in tmp_path.glob("compiled-*"):
        done.unlink()
    with structlog.testing.capture_logs() as told, compiling(tmp_path, patience_s=60):
        pass
    assert [line["event"] for line in told] == ["kernels_compiling", "kernels_ready"]


@pytest.mark.parametrize("place", ["cache", "file/cache"])
def test_it_is_known_that_kernels_are_compiled(tmp_path: Path, place: str):
    (tmp_path / "file").touch()
    known = []
    for _ in range(2):
        with compiling(tmp_path / place):
            known.append(starting._KERNELS.compiling_since is not None)
        assert starting._KERNELS.compiling_since is None
    assert known == [True, place != "cache"]


def test_a_place_that_can_not_be_written_is_said_and_no_hindrance(tmp_path: Path):
    (tmp_path / "file").touch()
    with structlog.testing.capture_logs() as told, compiling(tmp_path / "file" / "cache"):
        pass
    assert [line["event"] for line in told] == ["kernels_are_not_kept"]
