"""The worker's side of the broker: register, claim under a lease, publish a step, hand back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, cast

import msgspec

from engine_worker.broker import keys, scripts
from engine_worker.broker.connection import bounded, connect, connect_for_scripts, disconnect, is_cluster
from engine_worker.broker.live import GAP, Channel, Gap
from engine_worker.protocol import (
    Chunk,
    GenerateRequest,
    ModelCard,
    ProtocolError,
    WorkerStarting,
    WorkerStatus,
    decode,
    encode,
)

LEASE_MS: Final = 10_000
"""A worker that is silent for so long has lost what it held."""

MAX_CHUNKS_PER_CALL: Final = 1000
"""Of one request in one publish (Lua's stack is finite): after an outage the rest follows in the next call."""

OFFER_MS: Final = 1500
"""So long after a claim a worker may be handed what it has room for."""

_LONGEST_WAIT_S: Final = 5.0


class Verdict(IntEnum):
    """What publishing says of a request that the worker holds."""

    OK = 0
    CANCELLED = 1
    """Abort it and publish its last chunk: what was generated is billed."""
    FENCED = 2
    """It is no longer this worker's: drop it, publish nothing more of it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that this worker now owns, until its lease lapses."""

    request: GenerateRequest
    epoch: int
    attempt: int
    """From 1; hand-backs of draining workers are not counted."""
    remaining_ms: int
    """Until its deadline, by the server's clock."""
    logged_token_ids: tuple[int, ...]
    """Output that earlier attempts delivered: resume after it."""
    tier_class: int
    """Its tier's rank, or a better one to which its wait has raised it."""
    counter: float
    """Its tenant's virtual token counter when its turn came: the smaller goes first within a class."""
    log: tuple[Chunk, ...] = ()
    """The same as it was delivered, which tells several choices apart."""
    queued_ms: int = 0
    """In the queue before a worker first had it, by the server's clock."""


@dataclass(frozen=True, slots=True)
class Held:
    """A request that the worker holds, and what of it is to be published, in order."""

    request_id: str
    epoch: int
    chunks: Sequence[Chunk] = field(default=())


class WorkerBroker:
    """One per event loop and worker process. Raises BrokerUnavailable; every call may then be repeated."""

    def __init__(
        self, url: str, *, model: str, worker_id: str, lease_ms: int = LEASE_MS, timeout_s: float = 2.0
    ) -> None:
        self.model = model
        self.worker_id = worker_id
        self._url = url
        self.lease_ms = lease_ms
        self._prefix = keys.model_prefix(model)
        self._timeout_s = timeout_s
        self._adapters: tuple[str, ...] = ()
        self.waiting_class: int | None = None
        """The best class that had a backlog at the last publish; None when nothing waited."""
        self._redis = connect(url, timeout_s=timeout_s, max_connections=8)
        self._scripts = connect_for_scripts(url, self._redis, timeout_s=timeout_s)
        # Connections of their own, and a patience that outlasts the server's. A request that comes to an
        # idle worker waits for what these cost.
        patience_s = _LONGEST_WAIT_S + timeout_s
        waiting = connect(url, timeout_s=patience_s, max_connections=2)
        self._work = connect_for_scripts(url, waiting, timeout_s=patience_s)
        self._better = connect_for_scripts(url, waiting, timeout_s=patience_s)

    async def aclose(self) -> None:
        for client in (self._scripts, self._redis, self._work, self._better):
            await disconnect(client)

    async def starts(self, status: WorkerStarting) -> None:
        """It will serve the model: what it is at until then, for who asks meanwhile."""
        async with bounded(self._timeout_s):
            await self._redis.set(self._prefix + "starting", encode(status), px=keys.WORKER_TTL_MS)
            await cast(Any, self._redis.sadd(keys.STARTING, self.model))

    async def starts_no_more(self) -> None:
        """It will not."""
        async with bounded(self._timeout_s):
            await self._redis.delete(self._prefix + "starting")

    async def register(self, card: ModelCard, tokenizer_json: bytes) -> None:
        """Makes the model known to gateways. The tokenizer goes first: a card never names a missing one."""
        self._adapters = tuple(card.adapters)
        async with bounded(self._timeout_s):
            await self._redis.set(
                keys.tokenizer_key(card.tokenizer_sha256), tokenizer_json, ex=keys.CARD_TTL_S
            )
            await self._redis.set(self._prefix + "card", encode(card), ex=keys.CARD_TTL_S)
            await self._redis.delete(self._prefix + "withdrawn")
            await cast(Any, self._redis.sadd(keys.MODELS, self.model))

    async def card_of_others(self) -> ModelCard | None:
        """How other workers that live describe the model; None: there are none."""
        async with bounded(self._timeout_s):
            workers: list[bytes] = await cast(Any, self._redis.zrange(self._prefix + "workers", 0, -1))
            others = {worker.decode() for worker in workers} - {self.worker_id}
            # By what lapses at the server: clocks differ.
            if not others or not await self._redis.exists(
                *(f"{self._prefix}worker:{name}" for name in others)
            ):
                return None
            card: bytes | None = await cast(Any, self._redis.get(self._prefix + "card"))
        return None if card is None else decode(card, ModelCard)

    async def heartbeat(self, status: WorkerStatus, *, tokenizer_sha256: str) -> bool:
        """False when the registration is gone (Redis came back empty): register again."""
        reply = await self._call(
            "heartbeat", (self.worker_id, encode(status), keys.WORKER_TTL_MS, keys.CARD_TTL_S)
        )
        async with bounded(self._timeout_s):
            blob = await self._redis.expire(keys.tokenizer_key(tokenizer_sha256), keys.CARD_TTL_S)
            listed = await cast(Any, self._redis.sismember(keys.MODELS, self.model))
        return bool(reply and blob and listed)

    async def farewell(self) -> None:
        """The worker is gone at once, not when its heartbeat lapses."""
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(f"{self._prefix}worker:{self.worker_id}")
            pipe.zrem(self._prefix + "workers", self.worker_id)
            pipe.zrem(self._prefix + "offers", self.worker_id)
            await pipe.execute()

    async def withdraw(self) -> bool:
        """The same of a worker that goes for good. True: it was the model's last, and the model is gone with it."""
        return bool(await self._call("withdraw", (self.worker_id, keys.WORKER_TTL_MS)))

    async def claim(
        self, count: int, *, extra: int = 0, put_aside: int = 0, offers: bool = False
    ) -> list[Claim]:
        """Up to `count` requests, in order: no more than can start now.

        And up to `extra` more of classes better than `put_aside`, for which the worker would put aside
        what it runs of that class. Requests for an adapter that the registered card doesn't name are left
        to others.

        `offers`: for OFFER_MS from now, or until its next claim, the worker takes what is `handed` to it as well, as
        many as it has room for after these.
        """
        # A cluster's nodes pass messages on to each other: there nobody knows whether the worker hears.
        offer_ms = OFFER_MS if offers and not is_cluster(self._redis) else 0
        reply = await self._call(
            "claim", [self.worker_id, count, self.lease_ms, extra, put_aside, offer_ms, *self._adapters]
        )
        now_ms = int(reply[0])
        return [_claim(entry, now_ms) for entry in reply[1:]]

    def handed(self) -> Channel[Claim]:
        """Requests that it has offered to take, in the moment in which they come: it holds each from then on."""
        channel = keys.hand_channel(self.model, self.worker_id)
        return Channel(self._url, channel, _handed, timeout_s=self._timeout_s)

    async def wait_for_work(self, timeout_s: float) -> bool:
        """True as soon as a request is queued, False after `timeout_s` (at most 5): a hint to claim."""
        async with bounded(timeout_s + self._timeout_s):
            return bool(await cast(Any, self._work.blpop([self._prefix + "wake"], timeout_s)))

    async def wait_for_better(self, timeout_s: float) -> int | None:
        """The class of a request that was queued while nothing as good waited, or None after `timeout_s` (at most 5).

        A hint for a worker that is full of worse ones; of several workers one gets it.
        """
        async with bounded(timeout_s + self._timeout_s):
            found = await cast(Any, self._better.blpop([self._prefix + "better"], timeout_s))
        return None if found is None else int(found[1])

    async def publish(self, held: Sequence[Held]) -> list[Verdict]:
        """One step: appends to the logs, sends live, renews every lease, ends what is finished; a verdict each.

        `held` must name every request that the worker owns, also those without chunks. A repeat
        changes nothing, so a call whose effect is unknown is simply made again.
        """
        chunks: list[bytes] = []
        header: list[tuple[str, int, list[tuple[int, int, bool, int]]]] = []
        for request in held:
            described: list[tuple[int, int, bool, int]] = []
            for chunk in request.chunks:
                chunks.append(encode(chunk))
                described.append((chunk.seq, len(chunk.token_ids), chunk.finish is not None, len(chunks[-1])))
            header.append((request.request_id, request.epoch, described))
        *verdicts, waiting = await self._call(
            "publish", (self.lease_ms, msgspec.msgpack.encode(header), b"".join(chunks), self.worker_id)
        )
        self.waiting_class = None if waiting < 0 else waiting
        return [Verdict(verdict) for verdict in verdicts]

    async def release(self, held: Sequence[Held], *, failed: bool, code: str = "", message: str = "") -> None:
        """Hands requests back to the front of their lines.

        A failed attempt counts, is followed by a back-off, and the last one ends the request.
        """
        args: list[str | bytes | int] = [1 if failed else 0, code, message]
        for request in held:
            args += (request.request_id, request.epoch)
        await self._call("release", args)

    async def expire(self, *, limit: int = 100) -> tuple[int, int, int]:
        """The sweep; how many were ended by deadline, lapsed and queued again, lapsed and ended."""
        expired, requeued, ended = await self._call("expire", (limit,))
        return int(expired), int(requeued), int(ended)

    async def _call(self, verb: str, args: Sequence[str | bytes | int]) -> Any:
        async with bounded(self._timeout_s, caller=self._scripts):
            return await scripts.load(verb)(self._scripts, self._prefix, args)


def _handed(message: bytes) -> Claim | Gap:
    """Of one that can't be understood the lease lapses, as of one whose claim can't be."""
    terms, _, body = message.partition(b"\n")
    lifetime_ms, rank, counter = terms.split()
    try:
        request = decode(body, GenerateRequest)
    except ProtocolError:
        return GAP
    return Claim(
        request=request,
        epoch=1,
        attempt=1,
        remaining_ms=int(lifetime_ms),
        logged_token_ids=(),
        tier_class=int(rank),
        counter=float(counter),
    )


def _claim(entry: Sequence[Any], now_ms: int) -> Claim:
    body, epoch, attempt, deadline_ms, entries, tier_class, counter, queued_ms = entry
    log = tuple(decode(chunk, Chunk) for chunk in entries)
    return Claim(
        request=decode(body, GenerateRequest),
        epoch=int(epoch),
        attempt=int(attempt),
        remaining_ms=int(deadline_ms) - now_ms,
        logged_token_ids=tuple(token for chunk in log for token in chunk.token_ids),
        log=log,
        tier_class=int(tier_class),
        counter=float(counter or 0),
        queued_ms=int(queued_ms),
    )
