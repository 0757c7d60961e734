"""Which models can be asked for, kept at hand by each gateway process.

Model cards and tokenizers come from Redis, where workers put them: a gateway needs no model files.
A known model is answered from memory while a refresh runs beside; the token path does not wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from engine_worker.broker import BrokerUnavailable, GatewayBroker, TokenizerMissing
from engine_worker.protocol import ModelCard, Rung, StartStage, WorkerStarting
from inference.errors import ApiError, InvalidRequest, NotFound, Overloaded
from inference.prompts import PromptRenderer
from inference.site_policy import NO_DEFAULTS, Defaults, ModelRule, Policy, SitePolicy

log = structlog.get_logger(__name__)

_REFRESH_S: Final = 1.0
_REFRESH_UNKNOWN_S: Final = 0.2
"""Who asks for what no worker served at the last look may mean one that has come since."""
_UNAVAILABLE: Final = "model_unavailable"
_UNKNOWN: Final = "model_not_found"
_RETRY_S: Final = 5.0
_COMPILING_S: Final = 60.0
"""About as long as kernels are compiled on two cores; SDKs wait no longer than a minute."""
WORKER_ABSENCE_S: Final = 30.0
"""A worker that restarts is waited for so long since it last said that it is there; then requests for its model are
refused at once, and those that wait end."""
_AFTER_OUTAGE_S: Final = 15.0
"""So long have workers to say it when Redis was away, whatever it remembers."""


@dataclass(slots=True)
class ServedModel:
    card: ModelCard
    renderer: PromptRenderer
    first_seen_at: int
    """Unix seconds, for the API's `created`."""
    rung: Rung = Rung.NONE
    """Of the worker that is best off."""
    adapter: str = ""
    """The LoRA adapter that was asked for with it; "": none."""
    alias: str = ""
    """The other name that it was asked for by; "": its own."""
    defaults: Defaults = NO_DEFAULTS

    @property
    def names(self) -> tuple[str, ...]:
        """Those that a key's binding may know it by: a model's with all its adapters, an adapter's alone."""
        own = (self.card.model, self.alias) if self.alias else (self.card.model,)
        return (*own, *(f"{name}:{self.adapter}" for name in own)) if self.adapter else own

    def sampling_defaults(self) -> dict[str, float]:
        """What holds where a request names nothing, by field: the operator's, or else the model's own."""
        own = msgspec.structs.asdict(self.card.sampling)
        here = {"temperature": self.defaults.temperature, "top_p": self.defaults.top_p}
        both = own | {name: value for name, value in here.items() if value is not None}
        return {name: value for name, value in both.items() if value is not None}

    @property
    def asked_name(self) -> str:
        name = self.alias or self.card.model
        return f"{name}:{self.adapter}" if self.adapter else name


class ModelCatalogue:
    """One per event loop. Rendering and tokenising run in `executor`, which it owns."""

    def __init__(
        self,
        broker: GatewayBroker,
        policy: SitePolicy,
        *,
        expected: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._expected = frozenset(expected)
        self._policy = policy
        self._broker = broker
        self._models: dict[str, ServedModel] = {}
        self._alive_at: dict[str, float] = {}
        """When a worker last said that it is there."""
        self._is_redis_away = False
        self._redis_back_at = float("-inf")
        self._unreadable: dict[str, ModelCard] = {}
        self._withdrawn: frozenset[str] = frozenset()
        """The operator unloaded them: not here, whoever names them."""
        self._lapsed: frozenset[str] = frozenset()
        """No worker has served them for a day."""
        self._leaving: frozenset[str] = frozenset()
        """The operator is unloading them: what runs goes on, and nothing begins."""
        self._is_without_any = False
        """No worker has registered one here yet: nobody can tell which there will be."""
        self._starting: dict[str, WorkerStarting] = {}
        self._refreshed_at = float("-inf")
        self._refresh: asyncio.Task[None] | None = None
        self.executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenise")

    async def aclose(self) -> None:
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.gather(self._refresh, return_exceptions=True)
        self.executor.shutdown(wait=False, cancel_futures=True)

    async def get(self, name: str, *, tenant_public_id: str = "", kind: str | None = None) -> ServedModel:
        """The model of that name, or of MODEL:ADAPTER, if the tenant ("": any of them) may use it.

        Raises NotFound, InvalidRequest when it is not of that `kind` (see ModelCard), or Overloaded when no
        worker has served it for a while or Redis is away.
        """
        model = await self._find(name, tenant_public_id)
        if kind is not None:
            refuse_other_kind(model, kind)
        return model

    async def _find(self, name: str, tenant_public_id: str) -> ServedModel:
        policy = await self._policy.current()
        base, _, adapter = name.rpartition(":")
        if not base or name in self._models or name in policy.rules:
            return await self._as_decided(policy, name, name, tenant_public_id)
        model = await self._as_decided(policy, base, name, tenant_public_id)
        if adapter not in visible_adapters(model.card, tenant_public_id):
            raise _not_found(name)
        return replace(model, adapter=adapter)

    async def _as_decided(self, policy: Policy, name: str, asked: str, tenant_public_id: str) -> ServedModel:
        """With what the operator set for it."""
        if not policy.may_use(name, tenant_public_id):
            raise _not_found(asked)
        rule = policy.rules.get(name)
        if rule is None:
            return await self._get(name, asked, is_expected=name in self._expected)
        return _ruled(await self._get(policy.served_name(name), asked, is_expected=True), name, rule)

    async def _get(self, name: str, asked: str, *, is_expected: bool) -> ServedModel:
        """`is_expected`: the operator names it, so that it is only not here yet where no worker has registered it."""
        self._refresh_if_stale()
        model = self._models.get(name)
        if model is None or not self._is_alive(name):
            self._refresh_if_older(_REFRESH_UNKNOWN_S)
            await self._refreshed()
            model = self._models.get(name)
        if name in self._unreadable:
            raise Overloaded(
                f"The tokenizer or the chat template of '{name}' can't be read. Ask its operator to register it anew.",
                code=_UNAVAILABLE,
                retry_after_ms=60_000,
            )
        if model is None and name in self._withdrawn:
            raise _unloaded(asked)
        if model is None and not (is_expected or self._is_without_any or name in self._starting):
            raise _lapsed(asked) if name in self._lapsed else _not_found(asked)
        if model is None or not self._is_alive(name):
            raise _no_worker(name, self._starting.get(name))
        return model

    def refuse_leaving(self, name: str) -> None:
        """For who would begin. Raises NotFound."""
        if name in self._leaving:
            raise _unloaded(name)

    async def look(self) -> None:
        """Reads anew what workers there are, for who waits. What Redis does not answer is no look."""
        self._refresh_if_older(_REFRESH_S / 2)
        if self._refresh is not None:
            await asyncio.wait([self._refresh])

    def refuse_without_worker(
        self, name: str, *, has_begun: bool = False, waits_for_worker: bool = False
    ) -> None:
        """For who waits, after each look: raises Overloaded where at the last one no worker had been there for
        WORKER_ABSENCE_S, or NotFound where the operator unloaded it. `has_begun`: an answer of which some is made waits
        for the next worker as long as it may; and who `waits_for_worker` does.
        """
        if name in self._withdrawn:
            raise _unloaded(name)
        if has_begun:
            return
        self.refuse_leaving(name)
        if waits_for_worker:
            return
        alive_at = self._alive_at.get(name)
        if alive_at is not None and self._refreshed_at - alive_at > WORKER_ABSENCE_S:
            raise _no_worker(name, self._starting.get(name))

    async def all(self, tenant_public_id: str = "") -> list[ServedModel]:
        """Those that this tenant ("": any) may use, aliases too, by name; without a worker for a while: left out."""
        policy = await self._policy.current()
        self._refresh_if_stale()
        await self._refreshed()
        found: dict[str, ServedModel] = {}
        for name in {*self._models, *policy.aliases_for(tenant_public_id)}:
            rule, served = policy.rules.get(name), policy.served_name(name)
            if (
                served in self._models
                and served not in self._leaving
                and self._is_alive(served)
                and policy.is_visible(name, tenant_public_id)
            ):
                model = self._models[served]
                found[name] = _ruled(model, name, rule) if rule else model
        return [found[name] for name in sorted(found)]

    async def known_names(self, tenant_public_id: str) -> list[str]:
        """Of all that this tenant may use, aliases and adapters too, whether a worker serves it now or did before,
        or the operator names it. Raises BrokerUnavailable.
        """
        policy = await self._policy.current()
        known = await self._broker.known_models()
        cards = {card.model: card for card in known.cards}
        names = {*cards, *known.withdrawn, *known.lapsed, *self._expected, *policy.rules}
        usable = (name for name in names if policy.may_use(name, tenant_public_id))
        return with_adapters(usable, cards, policy, tenant_public_id)

    def _is_alive(self, name: str) -> bool:
        return self._clock() - self._alive_at[name] <= WORKER_ABSENCE_S

    def _refresh_if_stale(self) -> None:
        self._refresh_if_older(_REFRESH_S)

    def _refresh_if_older(self, than_s: float) -> None:
        is_running = self._refresh is not None and not self._refresh.done()
        if not is_running and self._clock() - self._refreshed_at > than_s:
            # For everybody: not in the context of the request that found the last reading too old.
            self._refresh = asyncio.create_task(self._read_cards(), name="model-catalogue", context=Context())
            self._refresh.add_done_callback(_swallow)

    async def _refreshed(self) -> None:
        if self._refresh is None:
            return
        try:
            await asyncio.shield(self._refresh)
        except BrokerUnavailable as error:
            raise Overloaded(
                "The models can't be looked up at the moment. Try again shortly.", code="queue_unavailable"
            ) from error

    async def _read_cards(self) -> None:
        try:
            await self._read_cards_now()
        except BrokerUnavailable:
            self._is_redis_away = True
            raise

    async def _read_cards_now(self) -> None:
        known_models = await self._broker.known_models()
        cards = known_models.cards
        now = self._clock()
        if self._is_redis_away:
            self._is_redis_away, self._redis_back_at = False, now
        at_least = self._redis_back_at - (WORKER_ABSENCE_S - _AFTER_OUTAGE_S)
        for name, silent_s in known_models.silent_s.items():
            # At once: requests look at it while the cards are still being read.
            self._alive_at[name] = max(now - silent_s, at_least)
        workers = await self._broker.workers()
        starting = await self._broker.starting()
        loop = asyncio.get_running_loop()
        for card in cards:
            known = self._models.get(card.model)
            if self._unreadable.get(card.model) == card or (known is not None and known.card == card):
                continue
            try:
                tokenizer = await self._broker.tokenizer_json(card.tokenizer_sha256)
                renderer = await loop.run_in_executor(self.executor, PromptRenderer, card, tokenizer)
            except TokenizerMissing:
                continue  # its worker puts both, the tokenizer first: looked for again with the next refresh
            except BrokerUnavailable:
                raise
            except Exception:
                # Whatever a worker registered: the other models are served all the same.
                log.exception("model_unreadable", model=card.model)
                self._unreadable[card.model] = card
                self._models.pop(card.model, None)
                continue
            self._unreadable.pop(card.model, None)
            first_seen_at = known.first_seen_at if known else int(time.time())
            self._models[card.model] = ServedModel(card, renderer, first_seen_at)
        self._starting = starting
        self._withdrawn, self._lapsed = known_models.withdrawn, known_models.lapsed
        self._is_without_any = not (cards or self._withdrawn)
        for gone in self._alive_at.keys() - {card.model for card in cards}:
            self._models.pop(gone, None)
            self._unreadable.pop(gone, None)
            self._alive_at.pop(gone, None)
        staying = {worker.model for worker in workers if not worker.goes_for_good}
        self._leaving = frozenset(worker.model for worker in workers if worker.model not in staying)
        rungs: dict[str, list[int]] = {}
        for worker in workers:
            if worker.model in self._models:
                rungs.setdefault(worker.model, []).append(worker.rung)
        for name, model in self._models.items():
            model.rung = Rung(min(rungs.get(name, [Rung.NONE]), default=Rung.NONE))
        self._refreshed_at = self._clock()


def _ruled(model: ServedModel, name: str, rule: ModelRule) -> ServedModel:
    card = model.card
    if rule.context_length is not None and rule.context_length < card.context_length:
        card = msgspec.structs.replace(card, context_length=rule.context_length)
    return replace(model, card=card, alias=name if rule.target else "", defaults=rule.defaults)


def visible_adapters(card: ModelCard, tenant_public_id: str) -> list[str]:
    """Those that this tenant may use, by name. Of others' it learns nothing."""
    return sorted(name for name, owner in card.adapters.items() if owner in ("", tenant_public_id))


def with_adapters(
    names: Iterable[str], cards: Mapping[str, ModelCard], policy: Policy, tenant_public_id: str
) -> list[str]:
    """Those names, and NAME:ADAPTER of each, in order. `cards`: by the model's own name."""
    found: list[str] = []
    for name in names:
        card = cards.get(policy.served_name(name))
        adapters = visible_adapters(card, tenant_public_id) if card else []
        found += [name, *(f"{name}:{adapter}" for adapter in adapters)]
    return sorted(found)


def refuse_other_kind(model: ServedModel, kind: str) -> None:
    """Raises InvalidRequest: text of an embedding model, or a vector of one that generates."""
    if model.card.kind != kind:
        name = model.card.model
        raise InvalidRequest(
            f"'{name}' is an embedding model: it generates no text, use /v1/embeddings."
            if kind == "generate"
            else f"'{name}' is no embedding model: it generates text, use /v1/chat/completions.",
            param="model",
        )


def refused_in_the_queue(code: str, message: str) -> ApiError | None:
    """The error with which `refuse_without_worker` ended it; None: that was not what ended it."""
    if code == _UNAVAILABLE:
        return Overloaded(message, code=code, retry_after_ms=round(_RETRY_S * 1000))
    return NotFound(message, code=code, param="model") if code == _UNKNOWN else None


def _no_worker(name: str, starting: WorkerStarting | None) -> Overloaded:
    words, retry_after_s = f"No worker serves '{name}' at the moment. Try again shortly.", _RETRY_S
    if starting is not None and starting.stage == StartStage.COMPILING:
        words = (
            f"The worker of '{name}' is starting: it compiles its kernels, once per machine, which takes a minute or "
            f"two. It has been at it for {starting.for_s:.0f} s."
        )
        retry_after_s = max(_RETRY_S, _COMPILING_S - starting.for_s)
    elif starting is not None:
        words = f"A worker is loading '{name}', for {starting.for_s:.0f} s so far. Try again shortly."
    return Overloaded(words, code=_UNAVAILABLE, retry_after_ms=round(retry_after_s * 1000))


def _not_found(name: str) -> NotFound:
    return _none_such(f"The model '{name[:200]}' does not exist or you do not have access to it.")


def _unloaded(name: str) -> NotFound:
    return _none_such(f"The model '{name}' was unloaded: it is not served any more.")


def _lapsed(name: str) -> NotFound:
    return _none_such(f"The model '{name}' was served once, and has had no worker for a day.")


def _none_such(words: str) -> NotFound:
    return NotFound(f"{words} GET /v1/models lists those that you may use.", code=_UNKNOWN, param="model")


def _swallow(task: asyncio.Task[None]) -> None:
    # Whoever waits for it sees the failure; when nobody does, the next request tries again.
    if not task.cancelled():
        task.exception()
