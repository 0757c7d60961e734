"""`manage.py engine`: a second worker beside `make run`, without a word about where its queue is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from engine_worker.broker import keys
from tests.e2e.site import ROOT
from tests.engine_worker.models import make_tiny_encoder
from weir import embedded


def engine(var_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    mine = ("WEIR_", "DATABASE_", "REDIS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return subprocess.Popen(
        [sys.executable, "manage.py", "engine", *arguments],
        cwd=ROOT, env=kept | {"WEIR_VAR_DIR": str(var_dir)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


@pytest.mark.timeout(200)
def test_it_finds_the_embedded_queue(tmp_path: Path):
    """As docs/operations.md has it for an embedding model, with a directory in place of the wheel's name."""
    server = embedded.prepare_valkey(tmp_path / "var", durable=False)
    running = embedded.start(server)
    worker = engine(
        tmp_path / "var", "--model", f"embed={make_tiny_encoder(tmp_path / 'model')}", "--threads", "1"
    )
    try:
        with redis.Redis.from_url(server.url) as client:
            deadline = time.monotonic() + 150
            while not client.exists(keys.model_prefix("embed") + "card"):
                assert worker.poll() is None, worker.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        worker.terminate()
        log, _ = worker.communicate(timeout=40)
        assert worker.returncode == 0, log
    finally:
        worker.kill()
        worker.communicate()
        running.terminate()
        running.wait(20)


def test_without_make_run_it_says_what_to_do(tmp_path: Path):
    worker = engine(tmp_path / "var", "--model", "embed=x")
    told, _ = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "the embedded servers are not running: start `make run` first" in told
    assert "Traceback" not in told
