"""What the platform leaves of its engine: the same load through REST streaming, and on the bare engine, in turn.

    make bench-serve                          # three rounds, about five minutes on two cores

Starts the whole product in a scratch directory (`weir up`: PostgreSQL, Valkey, Daphne, Celery, one
worker) and an engine of its own in this process; while one works, the other idles. The load is
`benchmarks/engine/workload.json`'s w20: 20 chats at once, greedy, end tokens ignored, as streamed
`/v1/completions` with token ids, so both make the same tokens. The client runs in this process and
shares the machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from benchmarks.engine import workload
from benchmarks.engine.engines.ours import run_ours
from benchmarks.engine.measure import percentile, processor
from benchmarks.engine.workload import Chat
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.model_store import DEFAULT_MODEL

_ROOT = Path(__file__).parent.parent
_MODEL_NAME = "bench"
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """One round. Times in seconds from the common start."""

    wall_s: float
    output_tokens: int
    first_token_s: list[float]
    finished_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


@contextmanager
def platform_running(model_dir: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """The whole product; gives its base URL and a key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "WEIR_VAR_DIR": str(scratch / "var"),
        "WEIR_PORT": str(port),
        "WEIR_MODEL": str(model_dir),
        "WEIR_MODEL_NAME": _MODEL_NAME,
        "WEIR_PREFIX_CACHE": "false",  # rounds repeat the same prompts
    }
    log_path = scratch / "up.log"
    with log_path.open("wb") as log:
        product = subprocess.Popen(
            [sys.executable, "manage.py", "up"], cwd=_ROOT, env=env, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + _START_S
        while "Weir is ready" not in log_path.read_text(errors="replace"):
            if product.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the product did not start:\n{log_path.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        lines = (scratch / "var" / "demo.env").read_text().splitlines()
        demo = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        yield demo["WEIR_BASE_URL"], demo["WEIR_API_KEY"]
    finally:
        product.send_signal(signal.SIGTERM)
        product.wait(60)


async def run_bare(engine: AsyncEngine, chats: Sequence[Chat]) -> Load:
    run = await run_ours(engine, chats)
    assert run.first_token_s is not None
    return Load(run.wall_s, sum(map(len, run.outputs)), run.first_token_s, run.finished_s)


async def run_rest(base_url: str, key: str, chats: Sequence[Chat]) -> Load:
    began = time.perf_counter()
    async with httpx.AsyncClient(
        base_url=f"{base_url}/v1/",
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(600),
        limits=httpx.Limits(max_connections=len(chats)),
    ) as client:

        async def one(chat: Chat) -> tuple[float, float, int]:
            body = {
                "model": _MODEL_NAME,
                "prompt": chat.prompt,
                "max_tokens": chat.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            first, tokens = 0.0, 0
            async with client.stream("POST", "completions", json=body) as answer:
                if answer.status_code != 200:
                    sys.exit(f"{answer.status_code}: {(await answer.aread()).decode()}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        sys.exit(f"broke off: {event}")
                    if not event["choices"]:
                        tokens = event["usage"]["completion_tokens"]
                    elif event["choices"][0]["text"]:
                        first = first or time.perf_counter() - began
            return first, time.perf_counter() - began, tokens

        results = await asyncio.gather(*(one(chat) for chat in chats))
    wall_s = time.perf_counter() - began
    assert [tokens for _, _, tokens in results] == [chat.output_tokens for chat in chats]
    firsts, finished = [first for first, _, _ in results], [end for _, end, _ in results]
    return Load(wall_s, sum(tokens for _, _, tokens in results), firsts, finished)


def summarise(name: str, loads: Sequence[Load]) -> dict[str, float]:
    """Medians over the rounds."""
    median = statistics.median
    summary = {
        "tokens_per_s": round(median(load.tokens_per_s for load in loads), 2),
        "latency_p50_s": round(median(percentile(load.finished_s, 0.5) for load in loads), 2),
        "latency_p99_s": round(median(percentile(load.finished_s, 0.99) for load in loads), 2),
        "ttft_p50_s": round(median(percentile(load.first_token_s, 0.5) for load in loads), 2),
        "ttft_p99_s": round(median(percentile(load.first_token_s, 0.99) for load in loads), 2),
    }
    each = ", ".join(f"{load.tokens_per_s:.1f}" for load in loads)
    print(
        f"  {name:12} {summary['tokens_per_s']:7.1f} tok/s   P50 {summary['latency_p50_s']:5.1f} s   "
        f"P99 {summary['latency_p99_s']:5.1f} s   TTFT P50 {summary['ttft_p50_s']:4.1f} s   ({each})"
    )
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    args = parser.parse_args()
    model_dir = prepared(args.model)
    threads = physical_cores()
    torch.set_num_threads(threads)
    chats = workload.load("w20")
    print(
        f"{processor()}, {threads} thread(s), torch {torch.__version__}, {model_dir.name}, "
        f"{len(chats)} streams at once, {args.rounds} round(s)"
    )
    bare: list[Load] = []
    rest: list[Load] = []
    with (
        tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch,
        platform_running(model_dir, Path(scratch)) as (base_url, key),
        asyncio.Runner() as runner,
    ):
        engine = AsyncEngine(EngineConfig(model_dir=model_dir, threads=threads, prefix_cache=False))
        runner.run(engine.start())
        # Everybody's first run pays for allocations and caches: not counted.
        warm_up = [Chat(chat.prompt[:32], 4) for chat in chats[:4]]
        runner.run(run_bare(engine, warm_up))
        runner.run(run_rest(base_url, key, warm_up))
        for _ in range(args.rounds):
            bare.append(runner.run(run_bare(engine, chats)))
            rest.append(runner.run(run_rest(base_url, key, chats)))
        runner.run(engine.stop())
    results = {"engine": summarise("bare engine", bare), "rest": summarise("REST stream", rest)}
    # Pair by pair, so that a machine that changes its pace in between does not show in it.
    share = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in zip(bare, rest, strict=True))
    print(f"  left of the bare engine's throughput: {share:.0%}")
    print(json.dumps({"share_of_engine": round(share, 3), "concurrent": len(chats), **results}))


if __name__ == "__main__":
    main()
