"""The bare engine against its peers: same weights, prompts, machine and call.

    make bench-engine                                        # three rounds of every workload
    make bench-engine ARGS="--workloads w20 --rounds 1 --peers none"
    make bench-engine ARGS="--install-peers"                 # first, once: peers with dependencies of their own

All requests of a workload arrive at once, greedy, end tokens ignored, so every engine makes the same
tokens. Each engine is a process of its own; they take turns within a round, so that whatever else the
machine does hits all of them. Where memory doesn't hold all of them: `--one-at-a-time`.

The last line is JSON: `ratios` is ours in the default precision over each peer, in output tokens per
second, by how many requests are at once; `ratios_fp32` and the like are the same of each other precision of ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.engine import workload
from benchmarks.engine.field import Field, Start
from benchmarks.engine.measure import Run, processor, summarise
from benchmarks.engine.peers import PEERS, REQUIREMENTS, install_peers, ours
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.model_store import DEFAULT_MODEL

_WORKLOADS = ("single", "w20", "w64", "mixed")
_OURS = ("fp32", "fp16", "int8")
_DEFAULT_PRECISION = EngineConfig.__dataclass_fields__["precision"].default


def compare(name: str, field: Field, rounds: int) -> dict[str, Any]:
    """All engines' medians on one workload, and who made the same tokens as ours in fp32."""
    chats = workload.load(name)
    prompt, output = sum(len(chat.prompt) for chat in chats), sum(chat.output_tokens for chat in chats)
    print(
        f"\n{name}: {len(chats)} at once, {prompt} prompt tokens, {output} output tokens, {rounds} round(s)"
    )
    made_by = [field.run(chats) for _ in range(rounds)]
    runs = {engine: [made[engine] for made in made_by] for engine in field.names}
    for engine, made in runs.items():
        for run in made:
            lengths = [len(tokens) for tokens in run.outputs]
            assert lengths == [chat.output_tokens for chat in chats], f"{engine} made {lengths} tokens"
    summaries = {engine: summarise(made) for engine, made in runs.items()}
    exact = runs.get("ours-fp32") or runs.get("transformers-static")
    for engine, summary in summaries.items():
        if exact is not None:
            same = sum(a == b for a, b in zip(exact[0].outputs, runs[engine][0].outputs, strict=True))
            summary["requests_as_exact"] = same
        _print_row(engine, summary, runs[engine])
    speeds = {engine: summary["tokens_per_s"] for engine, summary in summaries.items()}
    peers = {engine: speed for engine, speed in speeds.items() if not engine.startswith("ours")}
    return {
        "at_once": len(chats),
        "engines": summaries,
        **{
            _ratios_key(precision): {peer: round(ours / speed, 2) for peer, speed in peers.items()}
            for precision in _OURS
            if (ours := speeds.get(f"ours-{precision}"))
        },
    }


def _ratios_key(precision: str) -> str:
    return "ratios" if precision == _DEFAULT_PRECISION else f"ratios_{precision}"


def _by_count(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each precision that ran: ratios by how many requests are at once."""
    counts = {name: str(result["at_once"]) for name, result in results.items() if name != "mixed"}
    keys = [key for key in map(_ratios_key, _OURS) if all(key in result for result in results.values())]
    return {key: {count: results[name][key] for name, count in counts.items()} for key in keys}


def _print_row(engine: str, summary: dict[str, float], runs: Sequence[Run]) -> None:
    each = ", ".join(f"{run.tokens_per_s:.1f}" for run in runs)
    ttft = f"TTFT P50 {summary['ttft_p50_s']:5.2f} s" if "ttft_p50_s" in summary else " " * 16
    itl = f"ITL {summary['itl_ms']:6.1f} ms" if "itl_ms" in summary else " " * 13
    print(
        f"  {engine:20} {summary['tokens_per_s']:7.1f} tok/s  P99 {summary['latency_p99_s']:6.1f} s  {ttft}  {itl}"
        f"  {summary.get('peak_memory_mb', 0):6.0f} MB"
        f"  same tokens {summary.get('requests_as_exact', 0):3.0f}  ({each})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", choices=_WORKLOADS, default=_WORKLOADS)
    parser.add_argument("--precisions", nargs="*", choices=_OURS, default=_OURS, help="ours")
    parser.add_argument(
        "--peers", nargs="*", choices=[*PEERS, "none"], help="default: all that are installed"
    )
    parser.add_argument("--torch-kernels", action="store_true", help="ours in fp32 on torch's kernels too")
    parser.add_argument(
        "--install-peers",
        nargs="*",
        choices=REQUIREMENTS,
        help="make the others' environments, or those of the named, and stop",
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="start each engine for its turn alone: all together they need some 30 GB",
    )
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.install_peers is not None:
        install_peers(args.install_peers)
        return
    model_dir = prepared(args.model)
    threads = args.threads or physical_cores()
    wanted = [name for name in args.peers or PEERS if name != "none"]
    missing = [name for name in wanted if not PEERS[name].is_installed]
    print(
        f"{processor()}, {threads} thread(s), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{model_dir.name}; default precision {_DEFAULT_PRECISION}"
        + (f"; not installed: {', '.join(missing)}" if missing else "")
    )

    starts: dict[str, Start] = {f"ours-{p}": partial(ours, model_dir, threads, p) for p in args.precisions}
    if args.torch_kernels:
        starts["ours-fp32-torch"] = partial(ours, model_dir, threads, "fp32", kernels="torch")
    required = list(starts)
    for name in wanted:
        if name not in missing:
            starts[name] = partial(PEERS[name].start, model_dir, threads)
    field = Field(starts, required, args.one_at_a_time)
    try:
        results = {name: compare(name, field, args.rounds) for name in args.workloads}
    finally:
        field.stop()
    print(json.dumps({**_by_count(results), "precision": _DEFAULT_PRECISION, "workloads": results}))


if __name__ == "__main__":
    main()
