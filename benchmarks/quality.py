"""What a lower precision costs in quality: perplexity, and how far greedy answers agree with float32.

    make bench-quality

Perplexity is that of text which the repository ships (its documents and licence), in pieces of 512 tokens, scored by
the engine itself through its prompt log probabilities. Agreement is on the 20 chats of `make bench-engine`:
requests whose tokens are all the same, and the share of tokens before the first that differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any, get_args

from benchmarks.engine import workload
from benchmarks.engine.engines.ours import run_ours
from benchmarks.engine.measure import processor
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, Precision
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.types import OutputKind
from engine_worker.model_store import DEFAULT_MODEL
from engine_worker.protocol import SamplingParams
from engine_worker.runner.model_loader import load

_ROOT = Path(__file__).parents[1]
_PIECE = 512


def pieces(model_dir: Path, most: int) -> list[list[int]]:
    """Token ids of up to `most` pieces of the repository's own prose."""
    files = [_ROOT / "README.md", _ROOT / "LICENSE", *sorted((_ROOT / "docs").rglob("*.md"))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    ids = load(model_dir).tokenizer.encode(text, add_special_tokens=False).ids
    return [ids[at : at + _PIECE] for at in range(0, len(ids) - _PIECE, _PIECE)][:most]


async def score(engine: AsyncEngine, texts: list[list[int]]) -> float:
    """Perplexity: e to the mean negative log-likelihood of each token but the first of a piece."""

    async def one(number: int, ids: list[int]) -> float:
        sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        async for output in engine.generate(f"score-{number}", ids, sampling, OutputKind.FINAL):
            assert output.prompt_logprobs is not None
            return sum(position.chosen.logprob for position in output.prompt_logprobs)
        raise AssertionError("no output")

    total = 0.0
    for number, ids in enumerate(texts):  # one by one: each piece's logits are 100 MB
        total += await one(number, ids)
    return math.exp(-total / sum(len(ids) - 1 for ids in texts))


def agreement(exact: list[list[int]], other: list[list[int]]) -> dict[str, float]:
    shared = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(exact, other, strict=True)
    ]
    return {
        "requests_equal": sum(n == len(x) for n, x in zip(shared, exact, strict=True)),
        "tokens_before_first_difference": round(sum(shared) / sum(map(len, exact)), 3),
    }


async def measure(model_dir: Path, precision: Precision, texts: list[list[int]]) -> dict[str, Any]:
    engine = AsyncEngine(EngineConfig(model_dir=model_dir, precision=precision, prefix_cache=False))
    await engine.start()
    try:
        perplexity = await score(engine, texts)
        run = await run_ours(engine, workload.load("w20"))
    finally:
        await engine.stop()
    return {"perplexity": perplexity, "outputs": run.outputs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--pieces", type=int, default=24, help=f"at most, of {_PIECE} tokens")
    args = parser.parse_args()
    model_dir = prepared(args.model)
    texts = pieces(model_dir, args.pieces)
    print(f"{processor()}, {model_dir.name}, {len(texts)} pieces of {_PIECE} tokens, 20 chats of up to 160")
    measured = {name: asyncio.run(measure(model_dir, name, texts)) for name in get_args(Precision)}
    exact = measured["fp32"]
    results: dict[str, dict[str, float]] = {}
    for name, made in measured.items():
        results[name] = {
            "perplexity": round(made["perplexity"], 4),
            "perplexity_ratio": round(made["perplexity"] / exact["perplexity"], 5),
            **agreement(exact["outputs"], made["outputs"]),
        }
        print(f"  {name}: {results[name]}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
