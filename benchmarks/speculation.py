"""What guessing ahead by prompt lookup gives on text that repeats, and what it costs on text that does not.

    make bench-speculation                               # five rounds, some minutes on two cores
    python -m benchmarks.speculation --rounds 1          # a quick look

Two engines that differ in nothing but `speculative_tokens` take turns; one stream, greedy, end tokens
ignored. Repeating: a passage of 48 tokens six times over, which the model goes on with. Ordinary: chats of the
engine's workload. Both engines must give the same tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.engine.measure import processor
from benchmarks.engine.workload import load
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.model_store import DEFAULT_MODEL, ModelStoreError, ensure_model
from engine_worker.protocol import Finish, SamplingParams

_PASSAGE_TOKENS = 48
_REPEATS = 6
_OUTPUT_TOKENS = 96
_PROMPTS = 3


def prompts(kind: str) -> list[list[int]]:
    chats = [chat.prompt for chat in load("w20") if len(chat.prompt) >= _PASSAGE_TOKENS][:_PROMPTS]
    return chats if kind == "ordinary" else [chat[-_PASSAGE_TOKENS:] * _REPEATS for chat in chats]


async def run(engine: AsyncEngine, kind: str) -> tuple[float, list[list[int]], list[Finish]]:
    """Seconds between the first token and the last, summed over the prompts; the tokens; the ends."""
    spent, outputs, finishes = 0.0, [], []
    for number, prompt in enumerate(prompts(kind)):
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        began = 0.0
        async for output in engine.generate(f"{kind}-{number}", prompt, sampling):
            began = began or time.perf_counter()
            tokens += output.token_ids
            finishes += [output.finish] if output.finish else []
        spent += time.perf_counter() - began
        outputs.append(tokens)
    return spent, outputs, finishes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="per guess")
    args = parser.parse_args()
    try:
        model_dir = ensure_model(args.model, Path("var/models"))
    except ModelStoreError as error:
        sys.exit(str(error))
    threads = physical_cores()
    configs = {
        name: EngineConfig(model_dir=model_dir, speculative_tokens=tokens, threads=threads)
        for name, tokens in (("on", args.tokens), ("off", 0))
    }
    print(
        f"{processor()}, {threads} thread(s), torch {torch.__version__}, {model_dir.name} in "
        f"{configs['on'].precision}, one stream, {args.tokens} tokens per guess"
    )
    seconds: dict[str, dict[str, list[float]]] = {}
    accepted: dict[str, float] = {}
    with asyncio.Runner() as runner:
        engines = {name: AsyncEngine(config) for name, config in configs.items()}
        for engine in engines.values():
            runner.run(engine.start())
            runner.run(run(engine, "ordinary"))
        for number in range(args.rounds):
            for kind in ("repeating", "ordinary"):
                outputs = {}
                for name in sorted(engines, reverse=bool(number % 2)):
                    spent, outputs[name], finishes = runner.run(run(engines[name], kind))
                    seconds.setdefault(kind, {}).setdefault(name, []).append(spent)
                    if name == "on":
                        drafted = sum(finish.drafted_tokens for finish in finishes)
                        right = sum(finish.accepted_tokens for finish in finishes)
                        accepted[kind] = right / drafted if drafted else 0.0
                if outputs["on"] != outputs["off"]:
                    print(f"{kind}: the tokens differ, which only a tie in rounding explains")
        for engine in engines.values():
            runner.run(engine.stop())
    speedups = {
        kind: statistics.median(off / on for on, off in zip(taken["on"], taken["off"], strict=True))
        for kind, taken in seconds.items()
    }
    rates = {
        kind: _PROMPTS * (_OUTPUT_TOKENS - 1) / statistics.median(taken["on"])
        for kind, taken in seconds.items()
    }
    for kind, speedup in speedups.items():
        print(
            f"{kind}: {speedup:.2f} times as fast, {rates[kind]:.1f} tokens per second, "
            f"{accepted[kind]:.0%} of the guesses right"
        )
    print(
        json.dumps(
            {"rounds": args.rounds, "speedup": speedups, "tokens_per_s": rates, "accepted_share": accepted}
        )
    )


if __name__ == "__main__":
    main()
