"""How long running streams wait for a token while a prompt of 4,000 tokens is computed beside them.

    make bench-interference                                  # three rounds, a few minutes on two cores
    python -m benchmarks.interference --rounds 1 --target 150

Eight streams run; when each has had twenty tokens, the long prompt comes. Two engines that differ in nothing but
`itl_targets_ms`, each a process of its own, take turns: one has a target for the time between two tokens, the other
computes prompts in chunks as large as a step may be. Counted are the gaps between a stream's tokens from the long
prompt's arrival to its first token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.engine.measure import percentile, processor
from benchmarks.engine.workload import load
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.model_store import DEFAULT_MODEL
from engine_worker.protocol import SamplingParams

_STREAMS = 8
_STREAM_PROMPT = 40
_SETTLED_TOKENS = 20
_LONG_PROMPT = 4000
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds. What a round saw between the long prompt's arrival and its first token."""

    gaps_s: list[float]
    """Of all streams, those that had begun before the arrival included: who waited when it came counts."""
    first_token_s: float
    """Of the long prompt."""


class _Process:
    """An engine in a process of its own, which uses nothing between its turns."""

    _engine: AsyncEngine
    _runner: asyncio.Runner

    def __init__(self, config: EngineConfig) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _Process._start, (config,))

    @classmethod
    def _start(cls, config: EngineConfig) -> None:
        cls._runner = asyncio.Runner()
        cls._engine = AsyncEngine(config)
        cls._runner.run(cls._engine.start())

    @classmethod
    def _run(cls, seed: int) -> Beside:
        return cls._runner.run(asyncio.wait_for(beside_a_long_prompt(cls._engine, seed), _TIMEOUT_S))

    def run(self, seed: int) -> Beside:
        return self._pool.submit(_Process._run, seed).result(_TIMEOUT_S + 60)

    def stop(self) -> None:
        self._pool.shutdown()


async def beside_a_long_prompt(engine: AsyncEngine, seed: int) -> Beside:
    words = [token for chat in load("w20") for token in chat.prompt]
    rng = random.Random(seed)
    times: list[list[float]] = [[] for _ in range(_STREAMS)]
    settled = asyncio.Event()

    async def stream(number: int) -> None:
        sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        prompt = rng.choices(words, k=_STREAM_PROMPT)
        async for _ in engine.generate(f"stream-{number}", prompt, sampling):
            times[number].append(time.perf_counter())
            if min(map(len, times)) == _SETTLED_TOKENS:
                settled.set()

    async with asyncio.TaskGroup() as group:
        for number in range(_STREAMS):
            group.create_task(stream(number))
        await settled.wait()
        arrival = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in engine.generate("long", rng.choices(words, k=_LONG_PROMPT), sampling):
            pass
        first = time.perf_counter()
        for number in range(_STREAMS):
            engine.abort(f"stream-{number}")
    gaps = [
        after - before
        for row in times
        for before, after in itertools.pairwise(row)
        if after > arrival and before < first
    ]
    return Beside(gaps, first - arrival)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=float, default=100, help="milliseconds between two tokens")
    parser.add_argument("--precision", default=EngineConfig.__dataclass_fields__["precision"].default)
    args = parser.parse_args()
    model_dir = prepared(args.model)
    print(
        f"{processor()}, {physical_cores()} thread(s), {model_dir.name} in {args.precision}, {_STREAMS} streams, "
        f"a prompt of {_LONG_PROMPT} tokens, target {args.target:g} ms"
    )

    def start(targets: str) -> _Process:
        return _Process(
            EngineConfig(
                model_dir=model_dir, precision=args.precision, prefix_cache=False, itl_targets_ms=targets
            )
        )

    engines = {"target": start(f"0:{args.target:g}"), "none": start("")}
    rounds: dict[str, list[Beside]] = {name: [] for name in engines}
    try:
        for number in range(
            -1, args.rounds
        ):  # the first pays for caches and teaches the forecast: not counted
            for name in sorted(engines, reverse=bool(number % 2)):
                result = engines[name].run(number + 1)
                if number < 0:
                    continue
                rounds[name].append(result)
                print(
                    f"round {number + 1}, {name:6}: largest gap {1000 * max(result.gaps_s):6.0f} ms, "
                    f"P99 {1000 * percentile(result.gaps_s, 0.99):6.0f}, "
                    f"P50 {1000 * percentile(result.gaps_s, 0.5):6.0f}; "
                    f"the long prompt's first token after {result.first_token_s:5.2f} s",
                    flush=True,
                )
    finally:
        for engine in engines.values():
            engine.stop()
    medians = {
        f"{key}_{name}": round(statistics.median(of(result) for result in results), 1)
        for name, results in rounds.items()
        for key, of in (
            ("largest_gap_ms", lambda result: 1000 * max(result.gaps_s)),
            ("p99_gap_ms", lambda result: 1000 * percentile(result.gaps_s, 0.99)),
            ("p50_gap_ms", lambda result: 1000 * percentile(result.gaps_s, 0.5)),
            ("long_first_token_s", lambda result: result.first_token_s),
        )
    }
    print(json.dumps({"target_ms": args.target, "rounds": args.rounds, **medians}))


if __name__ == "__main__":
    main()
