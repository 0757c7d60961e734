"""What the broker costs: calls per second against the raw pipelined limit of the same server, in one run.

    make bench-broker [ARGS="--streams 64 --steps 2000 --requests 2000"]

Starts the embedded Valkey unless REDIS_URL names one. `publish` is one engine step of `--streams`
requests, one token each, from building the messages to the verdicts; `claim` and `finish` are of one
request. Beside each stands its `_raw`: what it would need at the least without any of the broker's
checks and order (a claim: pop, read, own, lease; a publish: append, counter, lease for each request, one
message; a finish: append, state, lease, usage, message), in one pipeline whose bytes are made
beforehand: what client and server can do at most. Interleaved in rounds, so that a noisy machine hits
both. `publish_share_of_step` is a publish over a step of as many streams of the default model on this
machine, measured after it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.model import prepared
from engine_worker.broker import GatewayBroker, Held, WorkerBroker
from engine_worker.broker.connection import connect
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.protocol import Chunk, Finish, GenerateRequest, SamplingParams, encode
from weir import embedded

MODEL = "bench-broker"
CHANNEL = "weir:live:bench"
ROUNDS = 10


def request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"0199c0de-0000-7000-8000-{number:012d}",
        model=MODEL,
        tenant_id=f"tenant-{number % 16}",
        tier="standard",
        tier_rank=1,
        prompt_token_ids=list(range(256)),
        sampling=SamplingParams(max_tokens=256),
        created_at_ms=0,
        deadline_ms=3_600_000,
        reply_channel=CHANNEL,
    )


async def timed(count: int, call: Callable[[int], Awaitable[object]], first: int = 0) -> list[float]:
    seconds: list[float] = []
    for n in range(first, first + count):
        began = time.perf_counter()
        await call(n)
        seconds.append(time.perf_counter() - began)
    return seconds


async def in_turn(
    count: int, ours: Callable[[int], Awaitable[object]], raw: Callable[[int], Awaitable[object]]
) -> tuple[list[float], list[float]]:
    """Seconds of so many calls of each, the two in rounds."""
    mine: list[float] = []
    least: list[float] = []
    per_round = count // ROUNDS
    for round_ in range(ROUNDS):
        mine += await timed(per_round, ours, first=round_ * per_round)
        least += await timed(per_round, raw)
    return mine, least


def compared(name: str, mine: list[float], least: list[float]) -> dict[str, Any]:
    return {
        name: summary(mine),
        f"{name}_raw": summary(least),
        f"{name}_vs_raw": round(statistics.median(least) / statistics.median(mine), 2),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "calls_per_s": round(len(seconds) / sum(seconds), 1),
        "p50_ms": round(statistics.median(ordered) * 1000, 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 3),
    }


async def bench(url: str, streams: int, steps: int, requests: int) -> dict[str, Any]:
    gateway = GatewayBroker(url, timeout_s=10)
    worker = WorkerBroker(url, model=MODEL, worker_id="bench", lease_ms=600_000, timeout_s=10)
    raw = connect(url, timeout_s=10)
    results: dict[str, Any] = {}

    async def enqueue(n: int) -> object:
        return await gateway.enqueue(request(n), max_queued=10**9, max_queued_per_tenant=10**9)

    requests = requests // ROUNDS * ROUNDS
    results["enqueue"] = summary(await timed(requests, enqueue))
    claims = []
    connection = raw.connection_pool.make_connection()
    await connection.connect()

    def in_one_pipeline(
        commands: Sequence[tuple[str | bytes | int, ...]],
    ) -> Callable[[int], Awaitable[None]]:
        packed = connection.pack_commands(commands)

        async def call(_: int) -> None:
            await connection.send_packed_command(packed)
            for _ in commands:
                await connection.read_response()

        return call

    body = encode(request(0))
    await in_one_pipeline(
        [("HSET", "bench:{raw}:req:0", "body", body)]
        + [("ZADD", "bench:{raw}:line", n, str(n)) for n in range(requests)]
    )(0)
    claim_raw = in_one_pipeline(
        [
            ("ZPOPMIN", "bench:{raw}:line"),
            ("HGET", "bench:{raw}:req:0", "body"),
            ("HSET", "bench:{raw}:req:0", "owner", "bench", "epoch", 1),
            ("ZADD", "bench:{raw}:leases", 1, "0"),
        ]
    )

    async def claim(_: int) -> None:
        claims.extend(await worker.claim(1))

    results |= compared("claim", *await in_turn(requests, claim, claim_raw))
    assert len(claims) == requests
    running = claims[:streams]

    async def publish(step: int) -> None:
        await worker.publish(
            [
                Held(
                    c.request.request_id,
                    c.epoch,
                    [
                        Chunk(
                            request_id=c.request.request_id,
                            epoch=c.epoch,
                            seq=step,
                            token_ids=[step],
                            text=" token",
                        )
                    ],
                )
                for c in running
            ]
        )

    ready = encode(
        Chunk(request_id=running[0].request.request_id, epoch=1, seq=1000, token_ids=[1000], text=" token")
    )

    commands: list[tuple[str | bytes | int, ...]] = []
    for n in range(streams):
        commands.append(("RPUSH", f"bench:{{raw}}:log:{n}", ready))
        commands.append(("HSET", f"bench:{{raw}}:req:{n}", "tokens", 1))
        commands.append(("ZADD", "bench:{raw}:leases", 1, str(n)))
    commands.append(("PUBLISH", CHANNEL, ready * streams))
    async with gateway.live(CHANNEL):  # somebody listens, as in life
        ours, theirs = await in_turn(steps, publish, in_one_pipeline(commands))
    results |= compared("publish", ours, theirs)
    results["publish"] |= {"streams": streams, "tokens_per_s": round(streams * len(ours) / sum(ours))}

    done = steps // ROUNDS * ROUNDS

    async def finish(n: int) -> None:
        c = claims[n]
        seq = done if n < streams else 0
        end = Finish(reason="stop", prompt_tokens=256, completion_tokens=seq)
        last = Chunk(request_id=c.request.request_id, epoch=c.epoch, seq=seq, finish=end)
        await worker.publish([Held(c.request.request_id, c.epoch, [last])])

    finish_raw = in_one_pipeline(
        [
            ("RPUSH", "bench:{raw}:log:0", ready),
            ("HSET", "bench:{raw}:req:0", "state", "finished"),
            ("ZREM", "bench:{raw}:leases", "0"),
            ("XADD", "bench:{raw}:usage", "*", "event", ready),
            ("PUBLISH", CHANNEL, ready),
        ]
    )
    results |= compared("finish", *await in_turn(requests, finish, finish_raw))

    async def ping(_: int) -> object:
        return await raw.ping()

    results["ping"] = summary(await timed(requests, ping))
    await connection.disconnect()
    stats: dict[str, dict[str, float]] = await raw.info("commandstats")
    results["server_us_per_script"] = round(stats["cmdstat_evalsha"]["usec_per_call"], 1)
    pipe = raw.pipeline(transaction=False)
    for key in [key async for key in raw.scan_iter(match=f"weir:[{{]m:{MODEL}[}}]:*")]:
        pipe.unlink(key)
    for key in [key async for key in raw.scan_iter(match="bench:*")]:
        pipe.unlink(key)
    await pipe.execute()
    for broker in (gateway, worker, raw):
        await broker.aclose()
    return results


async def step_ms(streams: int) -> float:
    """A step of the default model in which so many sequences are decoded, the median."""
    model_dir = prepared()
    engine = AsyncEngine(EngineConfig(model_dir=model_dir, max_num_seqs=streams, max_model_len=512))
    await engine.start()
    rng = random.Random(5)
    steps: list[float] = []

    async def stream(number: int) -> None:
        prompt = [rng.randrange(256) for _ in range(64)]
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate(str(number), prompt, sampling):
            stats = engine.stats()
            if number == 0 and stats.scheduled_tokens == streams:  # no prompt in it
                steps.append(stats.step_s)

    await asyncio.gather(*map(stream, range(streams)))
    await engine.stop()
    return statistics.median(steps) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    process = None
    url = os.environ.get("REDIS_URL")
    if not url:
        server = embedded.prepare_valkey(Path(tempfile.mkdtemp(prefix="weir-bench-")), durable=False)
        process, url = embedded.start(server), server.url
    try:
        results = asyncio.run(bench(url, arguments.streams, arguments.steps, arguments.requests))
    finally:
        if process:
            process.terminate()
            process.wait()
    step = asyncio.run(step_ms(arguments.streams))
    results["step_ms"] = round(step, 1)
    results["publish_share_of_step"] = round(results["publish"]["p50_ms"] / step, 4)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for name, value in results.items():
        print(f"{name:16} {value}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
