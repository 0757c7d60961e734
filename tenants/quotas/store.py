"""Reserve, settle, release, peek: the quota of a tenant, decided in Redis, once, for all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from engine_worker.broker.connection import Bounded, connect, connect_for_scripts, disconnect, is_cluster
from tenants.pricing import Price
from tenants.principal import LimitMetric, LimitSpec, Principal
from tenants.quotas import scripts
from tenants.quotas.buckets import (
    Bucket,
    bucket_of,
    late_key,
    line_keys,
    open_key,
    record_key,
    refused_key,
    warm_key,
)
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.types import Admitted, BucketState, Decision, Recalled, Refused, Settlement, Then

_DEAD_AFTER_MS: Final = 60_000
"""So long after its lease a reservation that nobody settled is given back: whoever made it is dead."""
_RECORD_GRACE_MS: Final = 24 * 3_600_000
"""How long after its lease a reservation can still be settled to the exact figure: as long as the usage event
may wait for a ledger that is down."""
_CLOSED_TTL_MS: Final = 10 * 60_000
"""How long a settled or released id is remembered, against a late repeat of its reserve."""
_SETTLED_AT_ONCE: Final = 100
"""Of a tenant's in one call, which takes the server some 8 us for each: it does nothing else meanwhile."""

_RECALL_ATTEMPTS: Final = 3
_RECALL_AT_MOST_MS: Final = 60_000
_LINE_TTL_MS: Final = 5000
_REFUSALS_KEPT: Final = 500
_REFUSALS_TTL_S: Final = 7 * 86_400


Recall = Callable[[Principal, Sequence[LimitSpec], datetime], Awaitable[Recalled]]
"""What the ledger knows of these limits at that moment. Raises QuotaUnavailable when the ledger can't be read."""


class QuotaStore:
    """One per event loop. Every call raises QuotaUnavailable after `timeout_s` at the latest.

    With `recall`, what Redis does not know (it was flushed, a budget's period began) starts from the ledger;
    without, it is taken for unused.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 2.0, max_connections: int = 64, recall: Recall | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._recall = recall
        self._recalling = asyncio.Lock()
        # It replaces a dead connection once: each script may be repeated safely.
        self._redis = connect(url, timeout_s=timeout_s, max_connections=max_connections)
        self._scripts = connect_for_scripts(url, self._redis, timeout_s=timeout_s)

    async def aclose(self) -> None:
        if self._scripts is not self._redis:
            await self._scripts.aclose()
        await disconnect(self._redis)

    async def reserve(
        self,
        *,
        reservation_id: str,
        principal: Principal,
        prompt_tokens: int,
        max_output_tokens: int,
        lease_ms: int,
        model: str = "",
        price: Price | None = None,
        accepted_at: datetime | None = None,
        runs_already: bool = False,
        then: Then | None = None,
    ) -> Decision:
        """Takes one request, prompt + max_output tokens, their cost and a slot from every limit that applies,
        or nothing.

        `reservation_id` is made by the server, unique per request; repeating a call with it takes
        nothing more. `lease_ms` bounds how long its slot is held when nobody settles: the request's
        deadline and a little. `accepted_at` (now, unless given) decides which period of a budget it is.
        `runs_already`: it was admitted before, and Redis has forgotten it: nothing refuses it now.
        `then` runs in the same call where all of the output is granted: only where the store `can_go_on`.

        Raises:
            QuotaUnavailable: Redis does not answer.
            ReservationClosed: this id was settled or released before.
        """
        if prompt_tokens < 0 or max_output_tokens < 0 or lease_ms < 1:
            raise ValueError("token counts must not be negative, and a lease is at least 1 ms")
        limits = tuple(limit for limit in principal.limits if limit.binds(model))
        tenant = principal.tenant_public_id
        accepted_at = accepted_at or datetime.now(UTC)
        buckets = [bucket_of(principal, spec, accepted_at) for spec in limits]
        head: list[str | int] = [
            reservation_id,
            prompt_tokens,
            max_output_tokens,
            lease_ms,
            _DEAD_AFTER_MS,
            lease_ms + _RECORD_GRACE_MS,
            0 if price is None else price.prompt_at_most_microusd(prompt_tokens),
            0 if price is None else price.output_microusd_per_mtok,
            0 if self._recall is None else 1,
            int(runs_already),
        ]
        keys = [record_key(tenant, reservation_id), open_key(tenant), warm_key(tenant)]
        keys += [bucket.key for bucket in buckets]
        args = head + [value for bucket in buckets for value in bucket.args]

        async def ask() -> Any:
            if then is None:
                return await self._call("reserve", keys, args)
            return await self._call_then(then, keys, args)

        reply = await self._with_recall(ask, principal, limits, buckets, accepted_at)
        verdict: bytes = reply[0]
        binding, retry_after_ms, requested, granted = (int(value) for value in reply[1:5])
        states = _states(limits, reply[5:])
        if verdict == b"closed":
            raise ReservationClosed(reservation_id)
        if verdict == b"admitted":
            return Admitted(reservation_id=reservation_id, buckets=states, max_output_tokens=granted)
        return Refused(
            buckets=states,
            binding=limits[binding - 1],
            requested=requested,
            retry_after_ms=None if retry_after_ms < 0 else retry_after_ms,
            is_spent=verdict == b"spent",
        )

    @property
    def can_go_on(self) -> bool:
        """Whether something of another hash tag may follow in the same call: not on a cluster."""
        return not is_cluster(self._redis)

    async def _call_then(self, then: Then, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        async with Bounded(self._timeout_s, QuotaUnavailable, caller=self._scripts):
            reply, *followed = await scripts.load_reserve_then(then.text)(
                self._scripts, [*keys, then.key], [len(args), *args, *then.args]
            )
        if followed:
            (then.reply,) = followed
        return reply

    async def _with_recall(
        self,
        ask: Callable[[], Awaitable[Any]],
        principal: Principal,
        limits: Sequence[LimitSpec],
        buckets: Sequence[Bucket],
        moment: datetime,
    ) -> Any:
        """The script's reply, with what Redis does not know put back from the ledger, where the store has one."""
        reply = await ask()
        if reply[0] != b"cold":
            return reply
        # One at a time: the others find it done. Asked again before, since the first may just have done it.
        async with self._recalling:
            for _ in range(_RECALL_ATTEMPTS):
                reply = await ask()
                if reply[0] != b"cold":
                    return reply
                assert self._recall is not None
                cold = [int(number) - 1 for number in reply[1:]]
                known = await self._recall(principal, [limits[i] for i in cold], moment)
                await self._restore(principal.tenant_public_id, [buckets[i] for i in cold], known)
        raise QuotaUnavailable("Redis forgets limits as fast as they are restored")

    async def _restore(self, tenant: str, buckets: Sequence[Bucket], known: Recalled) -> None:
        await self._call(
            "restore",
            [warm_key(tenant), late_key(tenant), *(bucket.key for bucket in buckets)],
            [known.through, *(value for bucket in buckets for value in bucket.args), *known.amounts],
        )

    async def forgotten(self, reservations: Sequence[tuple[str, str]]) -> list[bool]:
        """Of each (tenant, reservation id) whether Redis does not know it."""
        async with _bounded(self._timeout_s):
            pipe = self._redis.pipeline(transaction=False)
            for tenant, reservation_id in reservations:
                pipe.exists(record_key(tenant, reservation_id))
            return [not known for known in await pipe.execute()]

    async def book(self, row_id: int, row: Settlement, budgets: Sequence[tuple[LimitMetric, Bucket]]) -> None:
        """Counts a row of the ledger whose reservation is forgotten: once, in those of the budgets that were not put
        back from a ledger that had it already."""
        tenant = row.tenant_public_id
        keys = [record_key(tenant, row.reservation_id), late_key(tenant)]
        keys += [bucket.key for _, bucket in budgets]
        units = [row.units(metric) for metric, _ in budgets]
        if not await self._call("book", keys, [row_id, _RECORD_GRACE_MS, _RECALL_AT_MOST_MS, *units]):
            await self.settle(**asdict(row))  # its gateway has just taken it again

    async def settle(
        self,
        *,
        tenant_public_id: str,
        reservation_id: str,
        prompt_tokens: int,
        completion_tokens: int,
        cost_microusd: int = 0,
    ) -> bool:
        """Charges the exact figure and frees the slot. The first call counts, every later one changes nothing.

        Returns False when Redis does not know the reservation.
        """
        settlement = Settlement(
            tenant_public_id, reservation_id, prompt_tokens, completion_tokens, cost_microusd
        )
        (is_known,) = await self.settle_many([settlement])
        return is_known

    async def settle_many(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Each as `settle` would, those of a tenant in one call; and of each whether Redis knows it."""
        by_tenant: dict[str, list[Settlement]] = {}
        for one in settlements:
            if min(one.prompt_tokens, one.completion_tokens, one.cost_microusd) < 0:
                raise ValueError("counts must not be negative")
            by_tenant.setdefault(one.tenant_public_id, []).append(one)
        replies = await asyncio.gather(
            *(
                self._settle_of(tenant, its[start : start + _SETTLED_AT_ONCE])
                for tenant, its in by_tenant.items()
                for start in range(0, len(its), _SETTLED_AT_ONCE)
            )
        )
        known = {name: is_known for reply in replies for name, is_known in reply}
        return [known[one.tenant_public_id, one.reservation_id] for one in settlements]

    async def _settle_of(
        self, tenant: str, settlements: Sequence[Settlement]
    ) -> list[tuple[tuple[str, str], bool]]:
        keys = [open_key(tenant)]
        args: list[str | int] = [_CLOSED_TTL_MS]
        for one in settlements:
            keys.append(record_key(tenant, one.reservation_id))
            args += (one.reservation_id, one.prompt_tokens, one.completion_tokens, one.cost_microusd)
        verdicts = await self._call("settle", keys, args)
        return [
            ((tenant, one.reservation_id), int(verdict) >= 0)
            for one, verdict in zip(settlements, verdicts, strict=True)
        ]

    async def release(self, *, tenant_public_id: str, reservation_id: str) -> None:
        """As if it never was: for a request that could not be queued after all. Idempotent."""
        await self._call(
            "release",
            [record_key(tenant_public_id, reservation_id), open_key(tenant_public_id)],
            [reservation_id, _CLOSED_TTL_MS],
        )

    async def peek(self, principal: Principal, now: datetime | None = None) -> tuple[BucketState, ...]:
        """Every limit's state, in the order of `principal.limits`. Takes nothing.

        With `recall`, also right where Redis has forgotten it and nothing was asked since.
        """
        limits = principal.limits
        if not limits:
            return ()
        now = now or datetime.now(UTC)
        buckets = [bucket_of(principal, spec, now) for spec in limits]
        keys = [warm_key(principal.tenant_public_id), *(bucket.key for bucket in buckets)]
        args: list[str | int] = [0 if self._recall is None else 1]
        args += [value for bucket in buckets for value in bucket.args]
        reply = await self._with_recall(
            lambda: self._call("peek", keys, args), principal, limits, buckets, now
        )
        return _states(limits, reply)

    async def enter_line(
        self, tenant_public_id: str, key_public_id: str, request_id: str, *, at_most: int
    ) -> int | None:
        """How many of this key's waiting requests are before this one; None: the line is full. To be repeated while
        it waits: who has not asked for some seconds is gone."""
        keys = line_keys(tenant_public_id, key_public_id)
        place = int(await self._call("line", keys, [request_id, _LINE_TTL_MS, at_most]))
        return None if place < 0 else place

    async def leave_line(self, tenant_public_id: str, key_public_id: str, request_id: str) -> None:
        async with _bounded(self._timeout_s):
            pipe = self._redis.pipeline(transaction=False)
            for key in line_keys(tenant_public_id, key_public_id):
                pipe.zrem(key, request_id)
            await pipe.execute()

    async def note_refusal(self, tenant_public_id: str, text: str) -> None:
        """Keeps why a request was refused: the last some hundred, a week."""
        key = refused_key(tenant_public_id)
        async with _bounded(self._timeout_s):
            pipe = self._redis.pipeline(transaction=False)
            pipe.xadd(key, {"d": text}, maxlen=_REFUSALS_KEPT, approximate=True)
            pipe.expire(key, _REFUSALS_TTL_S)
            await pipe.execute()

    async def refusals(self, tenant_public_id: str) -> list[bytes]:
        """What `note_refusal` kept, newest first."""
        async with _bounded(self._timeout_s):
            entries: Any = await self._redis.xrevrange(refused_key(tenant_public_id), count=_REFUSALS_KEPT)
        return [fields[b"d"] for _, fields in entries]

    async def _call(self, verb: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        async with Bounded(self._timeout_s, QuotaUnavailable, caller=self._scripts):
            return await scripts.load(verb)(self._scripts, keys, args)


def _bounded(timeout_s: float) -> Bounded:
    return Bounded(timeout_s, QuotaUnavailable)


def _states(limits: Sequence[LimitSpec], flat: Sequence[Any]) -> tuple[BucketState, ...]:
    return tuple(
        BucketState(limit=spec, remaining=int(flat[2 * i]), reset_after_ms=int(flat[2 * i + 1]))
        for i, spec in enumerate(limits)
    )
