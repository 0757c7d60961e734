"""The gateway's side of the broker: put a request in, cancel it, read what came out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Literal, Unpack, cast

from engine_worker.broker import keys, scripts
from engine_worker.broker.connection import bounded, connect, connect_for_scripts, disconnect
from engine_worker.broker.doubts import Doubts
from engine_worker.broker.entry import Entry, Terms, entry_of
from engine_worker.broker.errors import (
    BrokerUnavailable,
    DuplicateRequestId,
    QueueFull,
    QueueScope,
    TokenizerMissing,
    UnknownRequest,
)
from engine_worker.broker.full_queues import FullQueues
from engine_worker.broker.live import LiveChannel
from engine_worker.protocol import (
    Chunk,
    Finish,
    GenerateRequest,
    ModelCard,
    UsageEvent,
    WorkerStarting,
    WorkerStatus,
    decode,
)

_SWEEP_INTERVAL_S = 1.0


State = Literal["queued", "running", "finished", "dead"]
"""`dead`: it ended with an error after its last attempt, and an operator may give it another life."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    position: int
    """About how many requests go first: what comes later may pass, and so may others give up."""


@dataclass(frozen=True, slots=True)
class RequestState:
    state: State
    position: int | None
    """About how many requests go first; None unless queued."""
    attempts: int
    tokens: int
    """Output tokens in the log."""
    tenant_id: str
    finish: Finish | None
    queued_ms: int
    """In the queue: so far, or until it was first claimed."""
    tier_rank: int


@dataclass(frozen=True, slots=True)
class KnownModels:
    cards: list[ModelCard]
    """Of models that have, or within a day had, a worker; by name."""
    withdrawn: frozenset[str]
    """Names of those whose last worker was told to go for good: see `WorkerBroker.withdraw`."""
    lapsed: frozenset[str]
    """Names of those that have had no worker for longer."""
    silent_s: dict[str, float]
    """Of models with a card: how long ago a worker of theirs last said that it is there, by the server's clock."""


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of a request's charge before the ledger has it."""

    tenant_id: str
    is_over: bool
    decision: str
    """Why it was admitted, as `enqueue` was told; '' once it is over: the event has it."""
    event: UsageEvent | None
    """Of one that is over, until the ledger has acknowledged it."""


class GatewayBroker:
    """One per event loop. Every call ends within `timeout_s`, by BrokerUnavailable if need be.

    From the first enqueue on, a task named `broker-sweep` runs the sweep of the models in use once
    a second, so that deadlines and lost workers are noticed even when no worker is left to do it.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._redis = connect(url, timeout_s=timeout_s)
        self._scripts = connect_for_scripts(url, self._redis, timeout_s=timeout_s)
        self._models: set[str] = set()
        self._full = FullQueues()
        self._sweeper: asyncio.Task[None] | None = None
        self._doubts = Doubts(self.cancel)

    async def aclose(self) -> None:
        await self._doubts.aclose()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await disconnect(self._scripts)
        await disconnect(self._redis)

    async def enqueue(self, request: GenerateRequest, **terms: Unpack[Terms]) -> Enqueued:
        """Queues the request, all or nothing.

        The deadline is taken as a duration from `created_at_ms`, so that the gateway's clock need
        not agree with the server's. When the call fails or is cancelled with its effect unknown,
        the request is cancelled in the background: a client that was told no is not served.

        Who calls the script together with something else takes `entry_of`, `entered` and `undo`.

        Raises: QueueFull, DuplicateRequestId, BrokerUnavailable.
        """
        entry = entry_of(request, **terms)
        try:
            reply = await self._call("enqueue", request.model, entry.args)
        except (BrokerUnavailable, asyncio.CancelledError):
            self.undo(request)
            raise
        return self.entered(entry, reply)

    def entered(self, entry: Entry, reply: Any) -> Enqueued:
        """Raises: QueueFull, DuplicateRequestId."""
        if reply[0] == b"duplicate":
            raise DuplicateRequestId(str(entry.args[0]))
        if reply[0] == b"full":
            refusal = QueueFull(cast(QueueScope, reply[1].decode()), int(reply[2]))
            self._full.remember(entry.line, entry.longest_ms, refusal)
            raise refusal
        self._sweep(entry.line[0])
        return Enqueued(position=int(reply[1]))

    def undo(self, request: GenerateRequest) -> None:
        """Whether it was queued is not known: it is cancelled in the background."""
        self._doubts.add(request.model, request.request_id)

    def refuse_if_full(self, model: str, *, tier_rank: int, tenant_id: str, max_wait_ms: int) -> None:
        """Asks nobody. Raises QueueFull where `enqueue` has just refused the like: see FullQueues."""
        self._full.check((model, tier_rank, tenant_id), max_wait_ms)

    async def cancel(self, model: str, request_id: str, *, if_last_watched_by: str = "") -> None:
        """Ends a request in any state; unknown and finished ones are left alone.

        With `if_last_watched_by`, a live channel, only when none has attached to the request after it: a
        client that dropped here may have resumed at another gateway.

        A queued one is over when this returns: usage event with the tokens it had, last Chunk
        published. A running one ends with its worker's next step.
        """
        await self._call("cancel", model, (request_id, if_last_watched_by))

    async def refuse(self, model: str, request_id: str, *, code: str, message: str) -> None:
        """Ends one that waits as a failure, with its reason; one that a worker has by now is left alone."""
        await self._call("refuse", model, (request_id, code, message))

    async def expire(self, model: str, *, limit: int = 100) -> None:
        """The sweep: ends what outlived its deadline, takes requests from lost workers."""
        await self._call("expire", model, (limit,))

    async def attach(self, model: str, request_id: str, channel: str) -> None:
        """From now on live tokens also go to `channel`. Attach first, then read the log: nothing falls between."""
        if not await self._call("attach", model, (request_id, channel)):
            raise UnknownRequest(request_id)

    async def read_log(self, model: str, request_id: str, *, from_seq: int = 0) -> list[Chunk]:
        """Every Chunk that holds a token at or after `from_seq`, and the last one if there is one.

        The first may begin before `from_seq`. Raises: UnknownRequest, BrokerUnavailable.
        """
        prefix = keys.model_prefix(model)
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(prefix + "req:" + request_id)
            pipe.lrange(prefix + "log:" + request_id, 0, -1)
            known, entries = await pipe.execute()
        if not known:
            raise UnknownRequest(request_id)
        chunks = [decode(entry, Chunk) for entry in entries]
        return [chunk for chunk in chunks if chunk.finish or chunk.seq + len(chunk.token_ids) > from_seq]

    async def request_state(self, model: str, request_id: str) -> RequestState:
        reply = await self._call("state", model, (request_id,))
        if not reply:
            raise UnknownRequest(request_id)
        state, ahead, attempts, tokens, tenant, last, queued_ms, rank = reply
        return RequestState(
            state=cast(State, state.decode()),
            position=int(ahead) if state == b"queued" else None,
            attempts=int(attempts),
            tokens=int(tokens),
            tenant_id=tenant.decode(),
            finish=decode(last, Chunk).finish if last else None,
            queued_ms=int(queued_ms),
            tier_rank=int(rank),
        )

    async def account_of(self, model: str, request_id: str) -> Account:
        """Raises: UnknownRequest, BrokerUnavailable."""
        prefix = keys.model_prefix(model)
        async with bounded(self._timeout_s):
            asked = ("tenant", "state", "decision", "event")
            found: list[Any] = await cast(Any, self._redis.hmget(f"{prefix}req:{request_id}", asked))
            tenant, state, decision, event_id = found
            if tenant is None:
                raise UnknownRequest(request_id)
            entries: Any = []
            if event_id is not None:
                entries = await self._redis.xrange(f"{prefix}usage", min=event_id, max=event_id)
        return Account(
            tenant_id=tenant.decode(),
            is_over=state in (b"finished", b"dead"),
            decision=decision.decode() if decision else "",
            event=decode(entries[0][1][b"e"], UsageEvent) if entries else None,
        )

    async def model_of(self, request_id: str) -> str:
        """The model that a request was for. Raises: UnknownRequest, BrokerUnavailable."""
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=False) as pipe:
            models = await self._models_known()
            for model in models:
                pipe.exists(keys.model_prefix(model) + "req:" + request_id)
            for model, is_known in zip(models, await pipe.execute() if models else (), strict=True):
                if is_known:
                    return model
        raise UnknownRequest(request_id)

    def live(self, channel: str) -> LiveChannel:
        """This process's tokens, as they are made."""
        return LiveChannel(self._url, channel, timeout_s=self._timeout_s)

    async def models(self) -> list[str]:
        """Names of models that ever had a worker."""
        async with bounded(self._timeout_s):
            return await self._models_known()

    async def model_cards(self) -> list[ModelCard]:
        return (await self.known_models()).cards

    async def known_models(self) -> KnownModels:
        cards: list[ModelCard] = []
        withdrawn: set[str] = set()
        lapsed: set[str] = set()
        silent_s: dict[str, float] = {}
        async with bounded(self._timeout_s):
            for model in await self._models_known():
                prefix = keys.model_prefix(model)
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.get(prefix + "card")
                    pipe.get(prefix + "withdrawn")
                    pipe.pttl(prefix + "card")
                    card, mark, left_ms = await pipe.execute()
                if card is not None:
                    cards.append(decode(card, ModelCard))
                    silent_s[model] = max(0.0, keys.CARD_TTL_S - left_ms / 1000)  # each heartbeat renews it
                else:
                    (lapsed if mark is None else withdrawn).add(model)
        return KnownModels(cards, frozenset(withdrawn), frozenset(lapsed), silent_s)

    async def tokenizer_json(self, sha256: str) -> bytes:
        """Bytes of the `tokenizer.json` that a ModelCard names. Raises: BrokerUnavailable, TokenizerMissing."""
        async with bounded(self._timeout_s):
            blob = await self._redis.get(keys.tokenizer_key(sha256))
        if blob is None:
            raise TokenizerMissing(f"no tokenizer {sha256[:12]} yet: its worker has to register again")
        return cast(bytes, blob)

    async def workers(self) -> list[WorkerStatus]:
        """Workers whose last heartbeat is younger than 15 s."""
        statuses: list[WorkerStatus] = []
        async with bounded(self._timeout_s):
            for model in await self._models_known():
                prefix = keys.model_prefix(model)
                ids = cast(list[bytes], await self._redis.zrange(prefix + "workers", 0, -1))
                if ids:
                    found: list[Any] = await self._redis.mget(
                        [f"{prefix}worker:{worker.decode()}" for worker in ids]
                    )
                    statuses += [decode(status, WorkerStatus) for status in found if status]
        return statuses

    async def starting(self) -> dict[str, WorkerStarting]:
        """By model: what a worker that will serve it is at, or was within the last 15 s."""
        found: dict[str, WorkerStarting] = {}
        async with bounded(self._timeout_s):
            members: set[bytes] = await cast(Any, self._redis.smembers(keys.STARTING))
            for model in sorted(member.decode() for member in members):
                status: Any = await self._redis.get(keys.model_prefix(model) + "starting")
                if status is None:
                    await cast(
                        Any, self._redis.srem(keys.STARTING, model)
                    )  # one that starts adds itself again
                else:
                    found[model] = decode(status, WorkerStarting)
        return found

    async def _models_known(self) -> list[str]:
        members: set[bytes] = await cast(Any, self._redis.smembers(keys.MODELS))
        return sorted(member.decode() for member in members)

    async def _call(self, verb: str, model: str, args: Sequence[str | bytes | int]) -> Any:
        prefix = keys.model_prefix(model)
        async with bounded(self._timeout_s, caller=self._scripts):
            return await scripts.load(verb)(self._scripts, prefix, args)

    def _sweep(self, model: str) -> None:
        self._models.add(model)
        if self._sweeper is None or self._sweeper.done():
            # For all requests: not in the context of the first.
            self._sweeper = asyncio.create_task(
                self._sweep_for_ever(), name="broker-sweep", context=Context()
            )

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            for model in sorted(self._models):
                with contextlib.suppress(BrokerUnavailable):
                    await self.expire(model)
