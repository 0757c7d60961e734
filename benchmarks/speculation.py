"""What guessing ahead by prompt lookup gives on text that repeats, and what it costs on text that does not.

    make bench-speculation                               # five rounds, some minutes on two cores
    python -m benchmarks.speculation --rounds 1          # a quick look

Two engines that differ in nothing but `speculative_tokens`, each a process of its own, take turns, and with them the
peers that are installed (`make bench-engine ARGS=--install-peers`); one stream, greedy, end tokens ignored. Repeating:
a passage of 48 tokens six times over, which the model goes on with. Ordinary: chats of the engine's workload. Ours with
and without guesses must give the same tokens. The last line is JSON; `ratios`: ours with guesses over each peer, in
tokens per second between the first token and the last.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.engine.measure import Run, processor
from benchmarks.engine.peers import PEERS, ours
from benchmarks.engine.workload import Chat, load
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.model_store import DEFAULT_MODEL

_PASSAGE_TOKENS = 48
_REPEATS = 6
_OUTPUT_TOKENS = 96
_PROMPTS = 3


def chats(kind: str) -> list[Chat]:
    prompts = [chat.prompt for chat in load("w20") if len(chat.prompt) >= _PASSAGE_TOKENS][:_PROMPTS]
    if kind == "repeating":
        prompts = [prompt[-_PASSAGE_TOKENS:] * _REPEATS for prompt in prompts]
    return [Chat(prompt, _OUTPUT_TOKENS) for prompt in prompts]


def decode_s(runs: list[Run]) -> float:
    """Seconds between the first token and the last, summed over the prompts."""
    return sum(run.finished_s[0] - run.first_token_s[0] for run in runs if run.first_token_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="per guess")
    parser.add_argument("--peers", nargs="*", choices=[*PEERS, "none"], default=["llama.cpp-q4_0"])
    parser.add_argument("--precision", default=EngineConfig.__dataclass_fields__["precision"].default)
    args = parser.parse_args()
    model_dir = prepared(args.model)
    threads = physical_cores()
    peers = [name for name in args.peers if name != "none" and PEERS[name].is_installed]
    print(
        f"{processor()}, {threads} thread(s), {model_dir.name} in {args.precision}, one stream, "
        f"{args.tokens} tokens per guess, beside {', '.join(peers) or 'nobody'}"
    )

    engines = {
        "on": ours(model_dir, threads, args.precision, speculative_tokens=args.tokens),
        "off": ours(model_dir, threads, args.precision, speculative_tokens=0),
        **{name: PEERS[name].start(model_dir, threads) for name in peers},
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    accepted: dict[str, float] = {}
    same = True
    try:
        for engine in engines.values():
            engine.run([Chat(chat.prompt, 8) for chat in chats("ordinary")])
        for number in range(args.rounds):
            for kind in ("repeating", "ordinary"):
                outputs = {}
                for name in sorted(engines, reverse=bool(number % 2)):
                    runs = [engines[name].run([chat]) for chat in chats(kind)]
                    outputs[name] = [run.outputs for run in runs]
                    seconds.setdefault(kind, {}).setdefault(name, []).append(decode_s(runs))
                    if name == "on":
                        drafted = sum(run.drafted_tokens for run in runs)
                        accepted[kind] = sum(run.accepted_tokens for run in runs) / max(1, drafted)
                same = same and outputs["on"] == outputs["off"]
    finally:
        for engine in engines.values():
            engine.stop()
    made = _PROMPTS * (_OUTPUT_TOKENS - 1)
    speeds = {
        kind: {name: made / statistics.median(each) for name, each in taken.items()}
        for kind, taken in seconds.items()
    }
    results = {
        kind: {
            "speedup": round(
                statistics.median(off / on for on, off in zip(taken["on"], taken["off"], strict=True)), 3
            ),
            "tokens_per_s": {name: round(speed, 1) for name, speed in speeds[kind].items()},
            "ratios": {name: round(speeds[kind]["on"] / speeds[kind][name], 2) for name in peers},
            "accepted_share": round(accepted[kind], 3),
        }
        for kind, taken in seconds.items()
    }
    for kind, result in results.items():
        print(
            f"{kind}: {result['speedup']:.2f} times as fast, tokens per second {result['tokens_per_s']}, "
            f"{result['accepted_share']:.0%} of the guesses right"
        )
    print(json.dumps({"rounds": args.rounds, "same_tokens": same, **results}))


if __name__ == "__main__":
    main()
