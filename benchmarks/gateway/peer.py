"""A peer's proxy as a process beside ours: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.gateway.product import answers


@contextlib.contextmanager
def running(
    name: str,
    argv: list[str],
    *,
    port: int,
    probe: str,
    scratch: Path,
    start_s: float,
    env: Mapping[str, str],
) -> Iterator[None]:
    """Until it answers at `probe`, and then within the block. Nothing of ours is in its environment."""
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    log = scratch / f"{name.lower()}.log"
    with log.open("wb") as file:
        proxy = subprocess.Popen(argv, env={**inherited, **env}, cwd=scratch, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + start_s
        while not answers(port, probe):
            if proxy.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield
    finally:
        proxy.terminate()
        try:
            proxy.wait(15)
        except subprocess.TimeoutExpired:
            proxy.kill()
            proxy.wait(10)
