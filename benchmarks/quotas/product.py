"""The product with several real gateways: PostgreSQL, Valkey, Daphne processes, one worker that makes letters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from weir import embedded

ROOT = Path(__file__).resolve().parents[2]
MODEL: Final = "letters"
ENDS_AFTER: Final = 120
"""Output tokens after which the worker's answers end by themselves: what is reserved beyond must come back."""
_START_S: Final = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def children(log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are put here end with the block, the last one first."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    except TimeoutError:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def servers(scratch: Path) -> Iterator[str]:
    """PostgreSQL (empty) and Valkey, as this process's DATABASE_URL and REDIS_URL; Django is set up on them."""
    scratch.chmod(0o755)
    os.environ["WEIR_VAR_DIR"] = str(scratch)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    started = []
    try:
        for name, server in (
            ("DATABASE_URL", embedded.prepare_postgres(scratch, durable=False)),
            ("REDIS_URL", embedded.prepare_valkey(scratch, durable=False)),
        ):
            started.append((server, embedded.start(server)))
            os.environ[name] = server.url
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        yield os.environ["REDIS_URL"]
        connections.close_all()
    finally:
        for server, process in reversed(started):
            process.send_signal(server.command.stop_signal)
            process.wait(30)


@contextmanager
def gateways(scratch: Path, count: int) -> Iterator[list[str]]:
    """The base URLs of so many Daphne processes, all with one worker behind them."""
    from tests.e2e.site import scripted_model

    log, model_dir = scratch / "product.log", scratch / "letters"
    model_dir.mkdir()
    ports = [free_port() for _ in range(count)]
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        "SCRIPTED_STEP_S": "0.02",
        "SCRIPTED_TOKENS_PER_STEP": "20",
        "SCRIPTED_MAX_NUM_SEQS": "256",
        "SCRIPTED_STOP_AFTER": str(ENDS_AFTER),
    }
    commands: list[Sequence[str]] = [
        ("tests.engine_worker.scripted_worker", MODEL, str(scripted_model(model_dir))),
        *(
            ("weir.daphne_server", "-v", "0", "-b", "127.0.0.1", "-p", str(p), "weir.asgi:application")
            for p in ports
        ),
    ]
    with children(log) as running, log.open("ab") as output:
        for command in commands:
            argv = [sys.executable, "-m", *command]
            running.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=output, stderr=output))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for(f"{url}/readyz", _START_S)
        yield urls


def wait_for(url: str, timeout_s: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until it answers 200. Raises TimeoutError, at once when the process that should answer is gone."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at and (process is None or process.poll() is None):
        try:
            if httpx.get(url, timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {timeout_s:g} s")
