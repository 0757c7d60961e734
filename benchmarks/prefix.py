"""What the prefix cache gives, and what it costs where it finds nothing.

    make bench-prefix                                       # five rounds, about ten minutes on two cores
    python -m benchmarks.prefix --rounds 1 --requests 4     # a quick look

Two engines that differ in nothing but the cache take turns within a round. Hits: requests one after
another, each a system prompt of 300 tokens, new in each round, and a question of its own; the first of
a round finds nothing and counts too. No hits: prompts that have nothing in common, all at once,
measured as the time until the last one is done. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine.measure import processor
from benchmarks.engine.workload import load
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.model_store import DEFAULT_MODEL, ModelStoreError, ensure_model
from engine_worker.protocol import SamplingParams

_SYSTEM_TOKENS = 300
_QUESTION_TOKENS = 40
_ANSWER_TOKENS = 4
_LONGER_ANSWER_TOKENS = 24


def make_tokens(rng: random.Random, count: int) -> list[int]:
    """Words of the engine's workload in random order: no two calls share a block."""
    words = [token for chat in load("w20") for token in chat.prompt]
    return [words[rng.randrange(len(words))] for _ in range(count)]


async def run_one(engine: AsyncEngine, name: str, prompt: list[int], max_tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were cached."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    began, first, cached = time.perf_counter(), 0.0, 0
    async for output in engine.generate(name, prompt, sampling):
        first = first or time.perf_counter() - began
        cached = output.finish.cached_tokens if output.finish else 0
    return first, cached


async def shared_prompt(engine: AsyncEngine, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Mean seconds to the first token, and the share of prompt tokens that was cached."""
    results = [
        await run_one(engine, f"shared-{i}", prompt, _ANSWER_TOKENS) for i, prompt in enumerate(prompts)
    ]
    share = sum(cached for _, cached in results) / sum(map(len, prompts))
    return statistics.mean(first for first, _ in results), share


async def no_hits(engine: AsyncEngine, prompts: Sequence[list[int]]) -> float:
    """Seconds until the last is done."""
    began = time.perf_counter()
    results = await asyncio.gather(
        *(run_one(engine, f"other-{i}", prompt, _LONGER_ANSWER_TOKENS) for i, prompt in enumerate(prompts))
    )
    assert not any(cached for _, cached in results)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--block-size", type=int, default=0, help="0: the engine's default")
    args = parser.parse_args()
    try:
        model_dir = ensure_model(args.model, Path("var/models"))
    except ModelStoreError as error:
        sys.exit(str(error))
    threads = physical_cores()
    rng = random.Random(3)  # noqa: S311
    with asyncio.Runner() as runner:
        given = {"block_size": args.block_size} if args.block_size else {}
        configs = {
            name: EngineConfig(model_dir=model_dir, prefix_cache=name == "on", threads=threads, **given)
            for name in ("on", "off")
        }
        print(
            f"{processor()}, {threads} thread(s), torch {torch.__version__}, {model_dir.name} in fp32, "
            f"blocks of {configs['on'].block_size}, seed 3"
        )
        engines = {name: AsyncEngine(config) for name, config in configs.items()}
        for engine in engines.values():
            runner.run(engine.start())
            runner.run(no_hits(engine, [make_tokens(rng, 64)]))
        ttft: dict[str, list[float]] = {"on": [], "off": []}
        wall: dict[str, list[float]] = {"on": [], "off": []}
        shares = []
        for number in range(args.rounds):
            system = make_tokens(rng, _SYSTEM_TOKENS)
            shared = [system + make_tokens(rng, _QUESTION_TOKENS) for _ in range(args.requests)]
            different = [make_tokens(rng, _SYSTEM_TOKENS) for _ in range(args.requests)]
            # Who goes first changes, so that a machine that gets slower favours nobody.
            for name in sorted(engines, reverse=bool(number % 2)):
                first, share = runner.run(shared_prompt(engines[name], shared))
                ttft[name].append(first)
                wall[name].append(runner.run(no_hits(engines[name], different)))
                shares += [share] if name == "on" else []
            print(
                f"round {number + 1}: first token {ttft['on'][-1] * 1000:.0f} ms with the cache, "
                f"{ttft['off'][-1] * 1000:.0f} ms without; no hits {wall['on'][-1]:.2f} s and {wall['off'][-1]:.2f} s"
            )
        for engine in engines.values():
            runner.run(engine.stop())
    medians = {
        key: statistics.median(values)
        for key, values in (
            ("ttft_on_s", ttft["on"]),
            ("ttft_off_s", ttft["off"]),
            ("ttft_speedup", [off / on for on, off in zip(ttft["on"], ttft["off"], strict=True)]),
            ("cached_share", shares),
            ("no_hits_on_s", wall["on"]),
            ("no_hits_off_s", wall["off"]),
            ("no_hits_cost", [on / off - 1 for on, off in zip(wall["on"], wall["off"], strict=True)]),
        )
    }
    print(
        f"medians of {args.rounds}: first token {medians['ttft_speedup']:.2f} times as fast, "
        f"{medians['cached_share']:.0%} of prompt tokens cached; without hits {medians['no_hits_cost']:+.1%}"
    )
    print(
        json.dumps(
            {
                "rounds": args.rounds,
                "requests": args.requests,
                "block_size": configs["on"].block_size,
                **medians,
            }
        )
    )


if __name__ == "__main__":
    main()
