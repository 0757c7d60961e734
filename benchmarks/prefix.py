"""What the prefix cache gives, and what it costs where it finds nothing.

    make bench-prefix                                       # nine rounds, some minutes on two cores
    python -m benchmarks.prefix --rounds 1 --requests 4     # a quick look

Two engines that differ in nothing but the cache, each a process of its own, take turns within a round.
Hits: requests one after another, each a system prompt of 300 tokens, new in each round, and a question of
its own; the first of a round finds nothing and counts too. No hits: prompts that have nothing in common, all
at once, measured as the time until the last one is done, twice a round and in mirrored order (one engine, the other,
the other, the one). As in an engine that has run for a while, no block is new: each pool is filled before the first
round, so that the cache has something to evict and the system has no memory to map. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.contestant import Contestant, Options
from benchmarks.engine.measure import processor
from benchmarks.engine.workload import Chat, load
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.model_store import DEFAULT_MODEL

_SYSTEM_TOKENS = 300
_QUESTION_TOKENS = 40
_ANSWER_TOKENS = 4
_LONGER_ANSWER_TOKENS = 24


def make_tokens(rng: random.Random, count: int) -> list[int]:
    """Words of the engine's workload in random order: no two calls share a block."""
    words = [token for chat in load("w20") for token in chat.prompt]
    return [words[rng.randrange(len(words))] for _ in range(count)]


def shared_prompt(engine: Contestant, chats: Sequence[Chat]) -> tuple[float, float]:
    """Mean seconds to the first token, and the share of prompt tokens that was cached."""
    runs = [engine.run([chat]) for chat in chats]
    cached = sum(run.cached_tokens for run in runs) / sum(len(chat.prompt) for chat in chats)
    return statistics.mean(run.first_token_s[0] for run in runs if run.first_token_s), cached


def no_hits(engine: Contestant, chats: Sequence[Chat]) -> float:
    """Seconds until the last is done."""
    run = engine.run(chats)
    assert not run.cached_tokens
    return run.wall_s


def fill(engine: Contestant, rng: random.Random, tokens: int) -> None:
    """Uses every block of a pool of so many tokens."""
    each = 1000
    engine.run([Chat(make_tokens(rng, each), 1) for _ in range(tokens // each + 1)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument(
        "--block-size", type=int, default=EngineConfig.__dataclass_fields__["block_size"].default
    )
    parser.add_argument("--kv-blocks", type=int, default=512, help="of each pool; some 220 are used at once")
    parser.add_argument("--precision", default=EngineConfig.__dataclass_fields__["precision"].default)
    args = parser.parse_args()
    model_dir = prepared(args.model)
    threads = physical_cores()
    rng = random.Random(3)
    print(
        f"{processor()}, {threads} thread(s), {model_dir.name} in {args.precision}, {args.kv_blocks} blocks of "
        f"{args.block_size}, seed 3"
    )

    def start(prefix_cache: bool) -> Contestant:
        settings: dict[str, Any] = {
            "prefix_cache": prefix_cache,
            "block_size": args.block_size,
            "num_kv_blocks": args.kv_blocks,
        }
        options = Options(str(model_dir), threads, args.precision, settings=settings)
        return Contestant("ours", options, Path(sys.executable))

    engines = {"on": start(True), "off": start(False)}
    ttft: dict[str, list[float]] = {"on": [], "off": []}
    wall: dict[str, list[float]] = {"on": [], "off": []}
    shares = []
    try:
        for engine in engines.values():
            fill(engine, rng, args.kv_blocks * args.block_size)
        for number in range(args.rounds):
            system = make_tokens(rng, _SYSTEM_TOKENS)
            shared = [
                Chat(system + make_tokens(rng, _QUESTION_TOKENS), _ANSWER_TOKENS)
                for _ in range(args.requests)
            ]
            others = [
                [Chat(make_tokens(rng, _SYSTEM_TOKENS), _LONGER_ANSWER_TOKENS) for _ in range(args.requests)]
                for _ in range(2)
            ]
            # Who goes first changes, so that a machine that gets slower favours nobody.
            order = sorted(engines, reverse=bool(number % 2))
            for name in order:
                first, share = shared_prompt(engines[name], shared)
                ttft[name].append(first)
                shares += [share] if name == "on" else []
            once = {name: no_hits(engines[name], others[0]) for name in order}
            again = {name: no_hits(engines[name], others[1]) for name in reversed(order)}
            for name in order:
                wall[name].append(once[name] + again[name])
            print(
                f"round {number + 1}: first token {ttft['on'][-1] * 1000:.0f} ms with the cache, "
                f"{ttft['off'][-1] * 1000:.0f} ms without; no hits {wall['on'][-1]:.2f} s and {wall['off'][-1]:.2f} s",
                flush=True,
            )
    finally:
        for engine in engines.values():
            engine.stop()
    medians = {
        key: round(statistics.median(values), 4)
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
    conditions = {
        name: getattr(args, name) for name in ("rounds", "requests", "block_size", "kv_blocks", "precision")
    }
    print(json.dumps({**conditions, **medians}))


if __name__ == "__main__":
    main()
