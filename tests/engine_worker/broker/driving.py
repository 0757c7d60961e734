"""Short words for what broker tests do over and over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from engine_worker.broker import Claim, GatewayBroker, Held, Verdict, WorkerBroker
from engine_worker.protocol import Chunk, Finish, GenerateRequest, ModelCard, UsageEvent, WorkerStatus, decode


async def put(gateway: GatewayBroker, request: GenerateRequest, **bounds: int) -> int:
    bounds = {"max_queued": 1000, "max_queued_per_tenant": 1000} | bounds
    return (await gateway.enqueue(request, **bounds)).position


async def backdate(redis_url: str, model: str, request_id: str, by_ms: int) -> None:
    """The request has waited so much longer."""
    async with Redis.from_url(redis_url, protocol=2) as client:
        await client.hincrby(f"weir:{{m:{model}}}:req:{request_id}", "created", -by_ms)


def name(claim: Claim) -> str:
    return claim.request.request_id


async def claim_one(worker: WorkerBroker) -> Claim:
    (claim,) = await worker.claim(1)
    return claim


def tokens(claim: Claim, seq: int, *token_ids: int) -> Chunk:
    return Chunk(
        request_id=claim.request.request_id,
        epoch=claim.epoch,
        seq=seq,
        token_ids=list(token_ids),
        text="x" * len(token_ids),
    )


def last(claim: Claim, seq: int, *token_ids: int, reason: str = "stop") -> Chunk:
    return Chunk(
        request_id=claim.request.request_id,
        epoch=claim.epoch,
        seq=seq,
        token_ids=list(token_ids),
        text="x" * len(token_ids),
        finish=Finish(
            reason=reason,
            prompt_tokens=len(claim.request.prompt_token_ids),
            completion_tokens=seq + len(token_ids),
        ),
    )


async def publish(worker: WorkerBroker, claim: Claim, *chunks: Chunk) -> Verdict:
    (verdict,) = await worker.publish([Held(claim.request.request_id, claim.epoch, chunks)])
    return verdict


async def usage_events(redis_url: str, model: str) -> list[UsageEvent]:
    async with Redis.from_url(redis_url, protocol=2) as client:
        entries: Any = await client.xrange(f"weir:{{m:{model}}}:usage")
    return [decode(fields[b"e"], UsageEvent) for _, fields in entries]


async def lapse_leases(redis_url: str, model: str) -> None:
    """Every running request's lease ends now."""
    key = f"weir:{{m:{model}}}:leases"
    async with Redis.from_url(redis_url, protocol=2) as client:
        for request_id in await client.zrange(key, 0, -1):
            await client.zadd(key, {request_id: 1}, xx=True)


async def end_backoffs(redis_url: str, model: str, at_ms: int = 1) -> None:
    """Every request that was put off may be claimed now, or from `at_ms` on."""
    key = f"weir:{{m:{model}}}:delayed"
    async with Redis.from_url(redis_url, protocol=2) as client:
        for request_id in await client.zrange(key, 0, -1):
            await client.zadd(key, {request_id: at_ms}, xx=True)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def card(model: str, **given: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "model": model,
        "revision": "rev",
        "architecture": "LlamaForCausalLM",
        "context_length": 2048,
        "vocab_size": 49152,
        "eos_token_ids": [2],
        "tokenizer_sha256": f"sha-of-{model}",
    }
    return ModelCard(**(fields | given))


def status(worker: WorkerBroker, **given: Any) -> WorkerStatus:
    fields: dict[str, Any] = {
        "worker_id": worker.worker_id,
        "model": worker.model,
        "device": "cpu",
        "started_at_ms": 1,
        "updated_at_ms": 2,
        "steps": 3,
        "running": 1,
        "waiting": 0,
        "max_num_seqs": 8,
        "kv_blocks_total": 100,
        "kv_blocks_used": 4,
        "step_ms": 5.0,
    }
    return WorkerStatus(**(fields | given))
