"""The supervisor on small real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from weir.children import ChildrenFile
from weir.errors import StartError
from weir.process import Command
from weir.supervisor import Child, Supervisor, backoff_s

ROOT = Path(__file__).resolve().parent.parent.parent


def python(name: str, code: str, **options: object) -> Command:
    return Command(name, (sys.executable, "-u", "-c", code), **options)  # type: ignore[arg-type]


SLEEP = "import time; print('up'); time.sleep(600)"


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(ChildrenFile(tmp_path / "children.json"), names=("short", "much-longer"))
    yield supervisor
    await supervisor.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.02)


async def test_lines_carry_the_name_also_the_last_and_the_endless(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
):
    code = (
        "import sys; print('one'); sys.stderr.write('two\\r\\n'); print('x' * 200_000); print('end', end='')"
    )
    (child,) = supervisor.start(python("short", code))
    await until(lambda: child.starts > 1)
    lines = capsys.readouterr().err.splitlines()
    assert {"short       | one", "short       | two", "short       | end"} <= set(lines)
    assert sum(len(line.removeprefix("short       | ")) for line in lines if "xxx" in line) == 200_000


async def test_what_ends_is_started_again_and_says_why(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
):
    (child,) = supervisor.start(python("short", SLEEP))
    await until(lambda: child.pid is not None and "up" in capsys.readouterr().err)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.pid not in (None, first))
    assert "was ended by SIGKILL; starts again in 0.5 s" in capsys.readouterr().err


def test_the_pause_grows_up_to_a_bound():
    assert [backoff_s(failures) for failures in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff_s(50) == 30


@pytest.mark.parametrize("outlives_last", [False, True])
async def test_it_stops_in_reverse_order_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outlives_last: bool
):
    supervisor = Supervisor(ChildrenFile(tmp_path / "children.json"))
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('bye'))); print('up'); signal.pause()"
    children: list[Child] = []
    shown = ""
    for name in ("first", "second"):
        children += supervisor.start(python(name, code), outlives_last=outlives_last and name == "second")

        def is_up(name: str = name) -> bool:
            nonlocal shown
            shown += capsys.readouterr().err
            return f"{name} | up" in shown

        await until(is_up)
    pids = [child.pid for child in children]
    await supervisor.stop()
    ends = [line for line in capsys.readouterr().err.splitlines() if "bye" in line]
    expected = ["second | bye", "first | bye"]
    assert ends == (expected[::-1] if outlives_last else expected)
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert not (tmp_path / "children.json").exists()


async def test_what_does_not_stop_is_killed_with_its_own_children(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
):
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('child', child.pid); time.sleep(600)"
    )
    (child,) = supervisor.start(python("short", code, stop_grace_s=0.3))
    shown = ""

    def is_up() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return "child" in shown

    await until(is_up)
    grandchild = psutil.Process(int(shown.split("child")[1].split()[0]))
    await supervisor.stop()
    await until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    assert "does not stop within 0.3 s: killed" in capsys.readouterr().err
    assert child.pid is None


async def test_one_that_keeps_ending_fails_the_start(supervisor: Supervisor):
    supervisor.start(python("short", "raise SystemExit(3)"))

    async def never() -> bool:
        return False

    with pytest.raises(StartError, match="short does not start"):
        await supervisor.until(never, what="it", timeout_s=30)


async def test_waiting_has_an_end(supervisor: Supervisor):
    supervisor.start(python("short", SLEEP))

    async def never() -> bool:
        return False

    with pytest.raises(StartError, match="it is not ready after"):
        await supervisor.until(never, what="it", timeout_s=0.2)


@pytest.mark.parametrize(
    "line", ["level=info event=compiling directory=x", '{"event": "compiling", "level": "info"}']
)
async def test_a_known_stage_stops_the_clock_and_is_told(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
):
    """A first start on a busy machine: the time in which kernels are compiled is no time-out."""
    done = tmp_path / "done"
    code = (
        f"import pathlib, time; print({line!r})\n"
        f"while not pathlib.Path({str(done)!r}).exists(): time.sleep(0.02)\n"
        "print('event=ready'); time.sleep(600)"
    )
    (child,) = supervisor.start(python("short", code, stages={"compiling": "compiling kernels", "ready": ""}))
    await until(lambda: child.stage != "")

    async def never() -> bool:
        return False

    waiting = asyncio.create_task(
        supervisor.until(never, what="it", timeout_s=0.3, advice="do this", tell_every_s=0.4), name="until"
    )
    shown = ""

    def is_told_twice() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return len(re.findall(r"short       \| compiling kernels: \d+ s so far", shown)) >= 2

    await until(is_told_twice)
    assert not waiting.done(), "the clock ran while it was compiling"
    done.touch()
    async with asyncio.timeout(20):
        with pytest.raises(StartError, match=r"it is not ready after \d+ s: do this"):
            await waiting
    assert child.stage == ""


async def test_a_stage_has_an_end_too(supervisor: Supervisor):
    (child,) = supervisor.start(
        python("short", "import time; print('event=compiling'); time.sleep(600)", stages={"compiling": "x"})
    )
    await until(lambda: child.stage != "")

    async def never() -> bool:
        return False

    async with asyncio.timeout(20):
        with pytest.raises(StartError, match="it is not ready after"):
            await supervisor.until(never, what="it", timeout_s=600, at_most_s=0.3)


async def test_the_stage_of_one_that_died_counts_no_more(supervisor: Supervisor):
    code = "import os, sys; print('event=compiling', flush=True); os.kill(os.getpid(), 9)"
    supervisor.start(python("short", code, stages={"compiling": "x"}))

    async def never() -> bool:
        return False

    async with asyncio.timeout(30):
        with pytest.raises(StartError, match="it is not ready after"):
            await supervisor.until(never, what="it", timeout_s=0.5)


async def test_who_is_stopped_twice_hears_of_it_once(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
):
    """A worker's second signal is to hand back at once: its grace is used only if there is none."""
    code = (
        "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up')\n"
        "signal.pause(); time.sleep(0.5)"
    )
    (child,) = supervisor.start(python("short", code))
    shown = ""

    def is_up() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return "up" in shown

    await until(is_up)
    first = asyncio.create_task(child.stop(), name="first-stop")
    await asyncio.sleep(0.1)
    await child.stop()
    await first
    assert capsys.readouterr().err.count("asked") == 1


_KILLED_SUPERVISOR = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, "platform")
from weir.children import ChildrenFile
from weir.process import Command
from weir.supervisor import Supervisor

async def main():
    supervisor = Supervisor(ChildrenFile(Path(sys.argv[1])))
    supervisor.start(Command("child", (sys.executable, "-c", sys.argv[2])))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start_and_kill_supervisor(children_file: Path, code: str) -> psutil.Process:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _KILLED_SUPERVISOR, str(children_file), code],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert supervisor.stderr is not None
    line = supervisor.stderr.readline()
    child = psutil.Process(int(line.split()[-1]))
    supervisor.kill()
    supervisor.wait()
    supervisor.stderr.close()
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
def test_children_do_not_outlive_a_supervisor_that_was_killed(tmp_path: Path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    child = start_and_kill_supervisor(tmp_path / "children.json", code)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_next_start_ends_what_survived_all_the_same(tmp_path: Path):
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    child = start_and_kill_supervisor(tmp_path / "children.json", deaf)
    assert child.is_running()
    assert ChildrenFile(tmp_path / "children.json").end_leftovers(grace_s=0.3) == ["child"]
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "children.json").exists()


def test_a_stranger_with_the_same_number_is_left_alone(tmp_path: Path):
    file = tmp_path / "children.json"
    file.write_text(f'[[{os.getpid()}, "gateway", 1.0], [999999999, "celery", 1.0]]')
    assert ChildrenFile(file).end_leftovers(grace_s=0.1) == []
    file.write_text("half a fi")
    assert ChildrenFile(file).end_leftovers(grace_s=0.1) == []
