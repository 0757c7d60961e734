"""`engine_worker`'s engine, bare: no broker, no gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat
from engine_worker.config import EngineConfig, Precision
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.protocol import Finish, SamplingParams


def start(options: Options) -> Engine:
    # Rounds repeat the same prompts, which peers compute each time.
    settings = {"prefix_cache": False, **options.settings}
    engine = AsyncEngine(
        EngineConfig(
            model_dir=Path(options.model_dir),
            precision=cast(Precision, options.precision),
            threads=options.threads,
            **settings,
        )
    )
    runner = asyncio.Runner()
    runner.run(engine.start())
    return lambda chats: runner.run(run_ours(engine, chats))


async def run_ours(engine: AsyncEngine, chats: Sequence[Chat]) -> Run:
    began = time.perf_counter()
    finishes: list[Finish] = []

    async def one(number: int, chat: Chat) -> tuple[list[int], float, float]:
        sampling = SamplingParams(max_tokens=chat.output_tokens, temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        first = 0.0
        async for output in engine.generate(f"bench-{number}", chat.prompt, sampling):
            first = first or time.perf_counter() - began
            tokens += output.token_ids
            finishes.extend([output.finish] if output.finish else [])
        return tokens, first, time.perf_counter() - began

    results = await asyncio.gather(*(one(i, chat) for i, chat in enumerate(chats)))
    tokens, first, finished = (list(column) for column in zip(*results, strict=True))
    return Run(
        time.perf_counter() - began,
        tokens,
        finished,
        first,
        cached_tokens=sum(finish.cached_tokens for finish in finishes),
        drafted_tokens=sum(finish.drafted_tokens for finish in finishes),
        accepted_tokens=sum(finish.accepted_tokens for finish in finishes),
    )
