"""The bare engine against `transformers`, static and continuous batching: same weights, prompts, machine and call.

    make bench-engine                                   # three rounds, about ten minutes on two cores
    python -m benchmarks.engine --peers none --rounds 1 # ours alone

All requests arrive at once, greedy, end tokens ignored, so every engine makes the same tokens. The
engines take turns within a round, so that whatever else the machine does hits all of them. Output
tokens per second count what was asked for; the padding of static batching counts as time.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.model_store import DEFAULT_MODEL, ModelStoreError, ensure_model
from engine_worker.protocol import SamplingParams

_WORKLOAD = Path(__file__).with_name("engine_workload.json")
_MAX_NUM_SEQS = 64
_MAX_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One engine, one round. Times in seconds from the common start."""

    wall_s: float
    outputs: list[list[int]]
    finished_s: list[float]
    first_token_s: list[float] | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.wall_s


def load_w20() -> list[Chat]:
    return [Chat(chat["ids"], chat["n"]) for chat in json.loads(_WORKLOAD.read_text())["w20"]]


def make_mixed(seed: int = 20) -> list[Chat]:
    """Twenty more, so that nothing is tuned to one file: lengths spread wider, words from the same texts."""
    rng = random.Random(seed)  # noqa: S311
    words = [token for chat in load_w20() for token in chat.prompt]
    chats = []
    for _ in range(20):
        prompt: list[int] = []
        for _ in range(round(2 ** rng.uniform(1, 6))):
            at = rng.randrange(len(words) - 8)
            prompt += words[at : at + 8]
        chats.append(Chat(prompt, rng.randint(16, 96)))
    return chats


async def run_ours(engine: AsyncEngine, chats: Sequence[Chat]) -> Run:
    began = time.perf_counter()

    async def one(number: int, chat: Chat) -> tuple[list[int], float, float]:
        sampling = SamplingParams(max_tokens=chat.output_tokens, temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        first = 0.0
        async for output in engine.generate(f"bench-{number}", chat.prompt, sampling):
            first = first or time.perf_counter() - began
            tokens += output.token_ids
        return tokens, first, time.perf_counter() - began

    results = await asyncio.gather(*(one(i, chat) for i, chat in enumerate(chats)))
    tokens, first, finished = (list(column) for column in zip(*results, strict=True))
    return Run(time.perf_counter() - began, tokens, finished, first)


@torch.inference_mode()
def run_static(model: Any, chats: Sequence[Chat]) -> Run:
    """One padded batch, which lasts as long as its longest answer."""
    width = max(len(chat.prompt) for chat in chats)
    ids = torch.zeros(len(chats), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, chat in enumerate(chats):
        ids[row, width - len(chat.prompt) :] = torch.tensor(chat.prompt)
        mask[row, width - len(chat.prompt) :] = 1
    began = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(chat.output_tokens for chat in chats),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    wall_s = time.perf_counter() - began
    outputs = [output[row, width : width + chat.output_tokens].tolist() for row, chat in enumerate(chats)]
    return Run(wall_s, outputs, [wall_s] * len(chats))


def run_continuous(model: Any, chats: Sequence[Chat]) -> Run:
    """What `generate_batch` does inside, with a length for each request."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=_MAX_BATCHED_TOKENS)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True, timeout=30
    ) as manager:
        began = time.perf_counter()
        names = [manager.add_request(chat.prompt, max_new_tokens=chat.output_tokens) for chat in chats]
        outputs: dict[str, list[int]] = {}
        finished: dict[str, float] = {}
        while len(outputs) < len(chats):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped early")
            elif result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
                finished[result.request_id] = time.perf_counter() - began
        wall_s = time.perf_counter() - began
    return Run(wall_s, [outputs[name] for name in names], [finished[name] for name in names])


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summarise(name: str, runs: Sequence[Run]) -> dict[str, float]:
    """Medians over the rounds."""
    median = statistics.median
    summary = {
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 2),
        "wall_s": round(median(run.wall_s for run in runs), 2),
        "latency_p50_s": round(median(percentile(run.finished_s, 0.5) for run in runs), 2),
        "latency_p99_s": round(median(percentile(run.finished_s, 0.99) for run in runs), 2),
    }
    firsts = [run.first_token_s for run in runs if run.first_token_s]
    if firsts:
        summary["ttft_p50_s"] = round(median(percentile(first, 0.5) for first in firsts), 2)
        summary["ttft_p99_s"] = round(median(percentile(first, 0.99) for first in firsts), 2)
    each = ", ".join(f"{run.tokens_per_s:.1f}" for run in runs)
    print(
        f"  {name:22} {summary['tokens_per_s']:8.1f} tok/s   P99 {summary['latency_p99_s']:6.1f} s   ({each})"
    )
    return summary


def agreement(ours: Run, peer: Run) -> str:
    equal = sum(a == b for a, b in zip(ours.outputs, peer.outputs, strict=True))
    return f"{equal}/{len(ours.outputs)}"


def compare(
    name: str, chats: Sequence[Chat], engines: dict[str, Callable[[Sequence[Chat]], Run]], rounds: int
) -> Any:
    prompt, output = sum(len(chat.prompt) for chat in chats), sum(chat.output_tokens for chat in chats)
    print(
        f"\n{name}: {len(chats)} at once, {prompt} prompt tokens, {output} output tokens, {rounds} round(s)"
    )
    runs: dict[str, list[Run]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine, run in engines.items():
            runs[engine].append(run(chats))
    for made in runs["ours"]:
        assert [len(tokens) for tokens in made.outputs] == [chat.output_tokens for chat in chats]
    summaries = {engine: summarise(engine, made) for engine, made in runs.items()}
    peers = [engine for engine in engines if engine != "ours"]
    return {
        "engines": summaries,
        "ratios": {
            peer: round(summaries["ours"]["tokens_per_s"] / summaries[peer]["tokens_per_s"], 2)
            for peer in peers
        },
        "requests_with_equal_tokens": {peer: agreement(runs["ours"][0], runs[peer][0]) for peer in peers},
    }


def processor() -> str:
    """The CPU's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--mixed-rounds", type=int, default=1, help="rounds of the second workload; 0 leaves it out"
    )
    parser.add_argument("--peers", choices=("all", "static", "cb", "none"), default="all")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp32")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    try:
        model_dir = ensure_model(args.model, Path("var/models"))
    except ModelStoreError as error:
        sys.exit(str(error))
    threads = args.threads or physical_cores()
    torch.set_num_threads(threads)
    print(
        f"{processor()}, {threads} thread(s), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{model_dir.name}, ours in {args.precision}, peers in fp32, seed 20"
    )
    with asyncio.Runner() as runner:
        engine = AsyncEngine(
            EngineConfig(
                model_dir=model_dir,
                precision=args.precision,
                max_num_seqs=_MAX_NUM_SEQS,
                max_num_batched_tokens=_MAX_BATCHED_TOKENS,
                threads=threads,
                prefix_cache=False,  # rounds repeat the same prompts, which peers compute each time
            )
        )
        runner.run(engine.start())
        engines: dict[str, Callable[[Sequence[Chat]], Run]] = {
            "ours": lambda chats: runner.run(run_ours(engine, chats))
        }
        if args.peers != "none":
            peer = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
            if args.peers in ("all", "static"):
                engines["transformers-static"] = lambda chats: run_static(peer, chats)
            if args.peers in ("all", "cb"):
                engines["transformers-cb"] = lambda chats: run_continuous(peer, chats)
        # Everybody's first run pays for allocations and caches: not counted.
        for run in engines.values():
            run([Chat(chat.prompt[:32], 4) for chat in load_w20()[:4]])
        results = {"w20": compare("w20", load_w20(), engines, args.rounds)}
        if args.mixed_rounds:
            results["mixed"] = compare("mixed", make_mixed(), engines, args.mixed_rounds)
        runner.run(engine.stop())
    print(
        json.dumps(
            {"ratios": {"20": results["w20"]["ratios"]}, "precision": args.precision, "workloads": results}
        )
    )


if __name__ == "__main__":
    main()
