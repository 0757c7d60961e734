"""The real processes that broker benchmarks run: Valkey, workers with a tiny random model and the real engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine_worker.broker import BrokerUnavailable, GatewayBroker
from tests.engine_worker.models import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
MODEL = "tiny"
START_S = 600.0
"""The first start on a machine compiles the kernels."""


def tiny_model(scratch: Path, *, positions: int = 1024) -> Path:
    """Two layers, a vocabulary of bytes, random weights: steps of milliseconds, exact as any."""
    directory = scratch / "tiny-model"
    directory.mkdir()
    return make_tiny_model(directory, max_position_embeddings=positions)


@dataclass
class WorkerProcess:
    """One `python -m engine_worker`, which may be killed and started again."""

    name: str
    redis_url: str
    model_dir: Path
    log: Path
    flags: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        flags = {"worker_id": f"{self.name}-{self.starts}", **self.flags}
        argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine_worker", "--model", f"{MODEL}={self.model_dir}", *argv],
                cwd=ROOT, env={**os.environ, "REDIS_URL": self.redis_url}, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def worker_id(self) -> str:
        return f"{self.name}-{self.starts}"

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """As a crash: nothing is said to anybody."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


async def wait_for_workers(
    broker: GatewayBroker, worker_ids: set[str], *, timeout_s: float = START_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if worker_ids <= {status.worker_id for status in await broker.workers()}:
                return
        except BrokerUnavailable:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for workers {sorted(worker_ids)}")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def one_worker(
    redis_url: str, scratch: Path, *, model_dir: Path | None = None, **flags: object
) -> AsyncIterator[GatewayBroker]:
    """A broker, and one worker behind it until the end; with the tiny model, unless another is given."""
    worker = WorkerProcess("w", redis_url, model_dir or tiny_model(scratch), scratch / "worker.log", flags)
    broker = GatewayBroker(redis_url, timeout_s=10)
    worker.start()
    try:
        await wait_for_workers(broker, {worker.worker_id})
        yield broker
    except TimeoutError:
        print((scratch / "worker.log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        worker.kill()
        await broker.aclose()
