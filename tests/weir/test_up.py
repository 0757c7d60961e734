"""`weir up` as a person starts it: a process of its own, in a directory of its own, on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from engine_worker.model_store import DEFAULT_MODEL, ensure_model
from weir import places, up
from weir.errors import StartError

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "var" / "models"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Up:
    """One `weir up`, its lines, and everything that it started."""

    def __init__(self, var_dir: Path, port: int, **variables: str) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("WEIR_", "DATABASE_", "REDIS_"))
        }
        self.log = var_dir.with_name(f"{var_dir.name}.log")
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up"],
                cwd=ROOT,
                env=kept | {"WEIR_VAR_DIR": str(var_dir), "WEIR_PORT": str(port)} | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 150) -> float:
        """Seconds that it took."""
        while "Weir is ready." not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < self.started + timeout_s, self.output()
            time.sleep(0.1)
        return time.monotonic() - self.started

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@pytest.fixture
def var_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("up") / "var"
    path.mkdir()
    ensure_model(DEFAULT_MODEL, MODELS, progress=False)
    (path / "models").symlink_to(MODELS)
    yield path
    data = (path / "postgres").resolve()
    for leftover in (places.socket_dir(path), data):
        subprocess.run(["rm", "-rf", leftover], check=True)  # noqa: S607 - as root it is another user's


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=15)
    return not alive


def is_littered(var_dir: Path) -> bool:
    """Whether something is left under /tmp."""
    sockets = places.socket_dir(var_dir)
    return places.is_temporary(sockets) and sockets.exists()


@pytest.mark.timeout(700)
def test_from_nothing_to_an_answer_and_back_to_nothing(var_dir: Path):
    port = free_port()
    first = Up(var_dir, port)
    try:
        # As a script waits: for the file, and then it asks.
        while not (var_dir / "demo.env").exists():
            assert first.process.poll() is None, first.output()
            time.sleep(0.05)
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=30).status_code == 200
        first.wait_ready()
        family = first.family()
        demo = dict(line.split("=", 1) for line in (var_dir / "demo.env").read_text().splitlines()[1:])
        assert stat.S_IMODE((var_dir / "demo.env").stat().st_mode) == 0o600
        assert demo["WEIR_BASE_URL"] == f"http://localhost:{port}"
        assert "curl -N" in first.output()
        assert "its scopes are inference, usage:read\n" in first.output()
        assert demo["WEIR_API_KEY"] not in first.output()

        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{port}/v1/chat/completions",
            headers={"Authorization": f"Bearer {demo['WEIR_API_KEY']}"},
            json={
                "model": DEFAULT_MODEL,
                "stream": True,
                "temperature": 0,
                "max_tokens": 12,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            },
            timeout=60,
        ) as response:
            assert response.status_code == 200, response.read()
            events = [
                line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")
            ]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
        assert "Paris" in "".join(deltas)

        second_at_once = Up(var_dir.with_name("var"), port)
        assert second_at_once.process.wait(timeout=30) != 0
        assert "running already" in second_at_once.output()
    finally:
        code = first.stop()
    assert code == 0, first.output()
    assert gone(family)
    assert not is_littered(var_dir)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    assert "Traceback" not in first.output()

    # The second start: quick, with everything that was there.
    second = Up(var_dir, port)
    try:
        second.wait_ready()
        again = dict(line.split("=", 1) for line in (var_dir / "demo.env").read_text().splitlines()[1:])
        assert again == demo
        usage = httpx.get(
            f"http://127.0.0.1:{port}/v1/models",
            headers={"Authorization": f"Bearer {demo['WEIR_API_KEY']}"},
            timeout=30,
        )
        assert [model["id"] for model in usage.json()["data"]] == [DEFAULT_MODEL]

        # Everything is killed at once, as by a power cut; then a third start must find its way.
        family = second.family()
        for process in [psutil.Process(second.process.pid), *family]:
            with suppress(psutil.NoSuchProcess):  # some end by themselves when the first does
                process.kill()
        second.process.wait(timeout=10)
        assert gone(family)
    finally:
        if second.process.poll() is None:
            second.stop()
    third = Up(var_dir, port)
    try:
        third.wait_ready()
        # Only the supervisor is killed: whatever it leaves must not keep the next start from working.
        family = third.family()
        third.process.kill()
        third.process.wait(timeout=10)
        fourth = Up(var_dir, port)
        try:
            fourth.wait_ready()
            assert gone(
                [process for process in family if process.pid not in {p.pid for p in fourth.family()}]
            )
        finally:
            assert fourth.stop(signal.SIGINT) == 0
    finally:
        if third.process.poll() is None:
            third.stop()


def test_a_taken_port_is_said(var_dir: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = Up(var_dir, port)
        assert start.process.wait(timeout=60) != 0
    assert re.search(rf"weir: port {port} on 127\.0\.0\.1 is taken", start.output())
    assert "Traceback" not in start.output()


def test_a_missing_model_is_said_and_leaves_nothing(var_dir: Path):
    start = Up(var_dir, free_port(), WEIR_MODEL="/no/such/model")
    assert start.process.wait(timeout=110) != 0
    assert "there is no model at /no/such/model" in start.output()
    assert "Traceback" not in start.output()
    assert not list(places.postgres_socket_dir(var_dir).glob(".s.PGSQL.*"))
    assert not is_littered(var_dir)


def test_stopped_while_starting_it_leaves_nothing(var_dir: Path):
    start = Up(var_dir, free_port())
    deadline = time.monotonic() + 60
    while "valkey" not in start.output() and "postgres" not in start.output():
        assert time.monotonic() < deadline, start.output()
        time.sleep(0.05)
    family = start.family()
    assert start.stop(signal.SIGINT) == 0, start.output()
    assert gone(family)
    assert not is_littered(var_dir)
    assert "Traceback" not in start.output()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a small disk, which only root can make")
def test_a_full_disk_is_said(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],  # noqa: S607
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("may not mount here")
    try:
        start = Up(disk / "var", free_port())
        assert start.process.wait(timeout=60) != 0
        assert f"the disk of {disk / 'var'} is full" in start.output()
        assert "Traceback" not in start.output()
    finally:
        (disk / "var.log").unlink(missing_ok=True)
        subprocess.run(["umount", disk], check=True)  # noqa: S607


def test_a_host_that_is_not_ours_is_said():
    with pytest.raises(StartError, match=r"WEIR_HOST is '203\.0\.113\.7'"):
        up._check_port("203.0.113.7", 0)
