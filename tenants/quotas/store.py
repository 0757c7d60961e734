"""Reserve, settle, release, peek: the quota of a tenant, decided in Redis, once, for all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from tenants.principal import LimitSpec, Principal
from tenants.quotas import scripts
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.types import Admitted, BucketState, Decision, Refused

_RECORD_GRACE_MS: Final = 15 * 60_000
"""How long after its lease a reservation can still be settled to the exact figure. Later its tokens stay
charged in full: the bucket has forgotten them by then, or soon will."""
_CLOSED_TTL_MS: Final = 10 * 60_000
"""How long a settled or released id is remembered, against a late repeat of its reserve."""


def tenant_prefix(tenant_public_id: str) -> str:
    """Of every quota key of a tenant: one hash tag, so one node of a cluster, so one script."""
    return f"weir:{{t:{tenant_public_id}}}:"


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a reservation turned out to use."""

    tenant_public_id: str
    reservation_id: str
    prompt_tokens: int
    completion_tokens: int


class QuotaStore:
    """One per event loop. Every call raises QuotaUnavailable after `timeout_s` at the latest."""

    def __init__(self, url: str, *, timeout_s: float = 2.0, max_connections: int = 64) -> None:
        self._timeout_s = timeout_s
        # A dead connection (the server restarted) is replaced once; each script may be repeated safely.
        # A cancelled or timed-out command closes its connection, so its reply can't reach the next caller.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            # None: redis-py would bound a write with asyncio.wait_for, which can swallow a cancellation before
            # Python 3.12 (python/cpython#86296). `_bounded` bounds the whole call.
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            protocol=2,
            retry=Retry(ConstantBackoff(0.02), 1, supported_errors=(RedisConnectionError,)),
            retry_on_error=[RedisConnectionError],
        )
        self._redis: Redis = Redis.from_pool(pool)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def reserve(
        self,
        *,
        reservation_id: str,
        principal: Principal,
        prompt_tokens: int,
        max_output_tokens: int,
        lease_ms: int,
    ) -> Decision:
        """Takes one request, prompt + max_output tokens and a slot from every limit that applies, or nothing.

        `reservation_id` is made by the server, unique per request; repeating a call with it takes
        nothing more. `lease_ms` bounds how long its slot is held when nobody settles: the request's
        deadline and a little.

        Raises:
            QuotaUnavailable: Redis does not answer.
            ReservationClosed: this id was settled or released before.
        """
        if prompt_tokens < 0 or max_output_tokens < 0 or lease_ms < 1:
            raise ValueError("token counts must not be negative, and a lease is at least 1 ms")
        limits = principal.limits
        tenant = principal.tenant_public_id
        reply = await self._call(
            "reserve",
            [_record_key(tenant, reservation_id), *_bucket_keys(tenant, limits)],
            [
                reservation_id,
                prompt_tokens,
                max_output_tokens,
                lease_ms,
                lease_ms + _RECORD_GRACE_MS,
                *_bucket_args(limits),
            ],
        )
        verdict: bytes = reply[0]
        binding, retry_after_ms, requested = (int(value) for value in reply[1:4])
        buckets = _states(limits, reply[4:])
        if verdict == b"closed":
            raise ReservationClosed(reservation_id)
        if verdict == b"admitted":
            return Admitted(reservation_id=reservation_id, buckets=buckets)
        return Refused(
            buckets=buckets,
            binding=limits[binding - 1],
            requested=requested,
            retry_after_ms=None if retry_after_ms < 0 else retry_after_ms,
        )

    async def settle(
        self, *, tenant_public_id: str, reservation_id: str, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Charges the exact figure and frees the slot. The first call counts, every later one changes nothing."""
        if prompt_tokens < 0 or completion_tokens < 0:
            raise ValueError("token counts must not be negative")
        await self._call(
            "settle",
            [_record_key(tenant_public_id, reservation_id)],
            [reservation_id, prompt_tokens, completion_tokens, _CLOSED_TTL_MS],
        )

    async def settle_many(self, settlements: Sequence[Settlement]) -> None:
        """Settles a batch in one round trip, for the ledger; each as `settle` would."""
        if not settlements:
            return
        script = scripts.load("settle")
        async with _bounded(self._timeout_s):
            # Loaded first: a pipeline can't fall back to the text for one of its commands.
            await self._redis.script_load(script.text)
            pipe = self._redis.pipeline(transaction=False)
            for one in settlements:
                key = _record_key(one.tenant_public_id, one.reservation_id)
                counts = (one.prompt_tokens, one.completion_tokens)
                if min(counts) < 0:
                    raise ValueError("token counts must not be negative")
                pipe.evalsha(script.sha1, 1, key, one.reservation_id, *counts, _CLOSED_TTL_MS)
            await pipe.execute()

    async def release(self, *, tenant_public_id: str, reservation_id: str) -> None:
        """As if it never was: for a request that could not be queued after all. Idempotent."""
        await self._call(
            "release", [_record_key(tenant_public_id, reservation_id)], [reservation_id, _CLOSED_TTL_MS]
        )

    async def peek(self, principal: Principal) -> tuple[BucketState, ...]:
        """Every limit's state, in the order of `principal.limits`. Takes nothing."""
        limits = principal.limits
        if not limits:
            return ()
        reply = await self._call(
            "peek", _bucket_keys(principal.tenant_public_id, limits), _bucket_args(limits)
        )
        return _states(limits, reply)

    async def _call(self, verb: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        async with _bounded(self._timeout_s):
            return await scripts.load(verb)(self._redis, keys, args)


@asynccontextmanager
async def _bounded(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise QuotaUnavailable(f"Redis did not answer within {timeout_s:g} s") from error
    except RedisError as error:
        raise QuotaUnavailable(f"{type(error).__name__}: {error}") from error


def _record_key(tenant_public_id: str, reservation_id: str) -> str:
    return f"{tenant_prefix(tenant_public_id)}reservation:{reservation_id}"


def _bucket_keys(tenant_public_id: str, limits: Sequence[LimitSpec]) -> list[str]:
    prefix = tenant_prefix(tenant_public_id)
    return [f"{prefix}quota:{spec.scope}:{spec.owner_id}:{spec.metric}:{spec.period_s}" for spec in limits]


def _bucket_args(limits: Sequence[LimitSpec]) -> list[str | int]:
    args: list[str | int] = []
    for spec in limits:
        args += [spec.metric.value, spec.amount, spec.period_s, spec.burst]
    return args


def _states(limits: Sequence[LimitSpec], flat: Sequence[Any]) -> tuple[BucketState, ...]:
    return tuple(
        BucketState(limit=spec, remaining=int(flat[2 * i]), reset_after_ms=int(flat[2 * i + 1]))
        for i, spec in enumerate(limits)
    )
