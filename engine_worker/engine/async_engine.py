"""The engine as asyncio sees it: the model steps in a thread of its own, requests and outputs cross by queues."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import structlog

from engine_worker.config import EngineConfig
from engine_worker.engine.admission import Admission
from engine_worker.engine.build import Built, build
from engine_worker.engine.core import EngineCore, Step
from engine_worker.engine.errors import DuplicateRequest, EngineDead, EngineFailure
from engine_worker.engine.measurements import Measurements
from engine_worker.engine.types import EngineRequest, EngineStats, OutputKind, RequestOutput, StepOutputs
from engine_worker.protocol import FinishReason, PositionLogprobs, SamplingParams

log = structlog.get_logger(__name__)

_Stream = asyncio.Queue[RequestOutput | EngineFailure]
_Command = Callable[[EngineCore], None]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A request that has not had its last output. `stream` is None for those whose outputs go to `steps()`."""

    request_id: str
    stream: _Stream | None


class AsyncEngine:
    """See `types.Engine`. Everything but `_run` and what it calls belongs to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uids = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}
        self._live: dict[str, int] = {}  # request id -> uid, of those not aborted
        self._steps: asyncio.Queue[StepOutputs | EngineFailure | None] = asyncio.Queue()
        self._stats = EngineStats(0, 0, 0, 0, 0, 0.0, 0, 0)
        self._admission: Admission | None = None
        self._meter = Measurements()
        self._dead: EngineDead | None = EngineDead("the engine has not been started")

    # -- life

    async def start(self) -> None:
        """Loads the model. Raises UnsupportedModel, or whatever else the loading failed with."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="weir-engine", daemon=True)
        self._thread.start()
        await ready

    async def stop(self) -> None:
        self._dead = self._dead or EngineDead("the engine was stopped")
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            # What the thread posted last is in the loop's queue by now; let it be delivered.
            await asyncio.sleep(0)
        self._steps.put_nowait(None)

    @property
    def limits(self) -> Admission:
        """The loaded model's vocabulary, end tokens and context. Raises EngineDead before `start`."""
        if self._admission is None:
            raise EngineDead("the engine has not been started")
        return self._admission

    # -- requests

    def add(self, request: EngineRequest) -> None:
        self._submit(request, None)

    def abort(self, request_id: str, reason: str = FinishReason.CANCELLED) -> None:
        # The id is free at once: what was aborted is known by its uid from here on, so a new request
        # under the same id can't be hit by an abort of the old one.
        uid = self._live.pop(request_id, None)
        if uid is not None:
            self._commands.put(lambda core: core.abort(uid, reason))

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while (item := await self._steps.get()) is not None:
            if isinstance(item, EngineFailure):
                raise item
            yield item

    async def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        output_kind: OutputKind = OutputKind.DELTA,
        cancel_after: int | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request. Closing the iterator aborts it within a step.

        `sampling_params` None: greedy, as many tokens as the context leaves. Its `seed` is taken as it is, 0 unless
        given: the engine draws none, so that the same call gives the same tokens. `cancel_after`: it is
        cancelled when it has so many tokens. `deadline`: Unix time in seconds. Raises InvalidRequest,
        DuplicateRequest or EngineDead at the first item.
        """
        limits = self.limits
        if isinstance(prompt, str):
            prompt = (await asyncio.to_thread(limits.tokenizer.encode, prompt)).ids
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling_params or SamplingParams(max_tokens=limits.max_model_len, temperature=0.0),
            deadline_ms=None if deadline is None else int(deadline * 1000),
            cancel_after=cancel_after,
        )
        stream: _Stream = asyncio.Queue()
        uid = self._submit(request, stream)
        try:
            async for output in _shaped(stream, output_kind):
                yield output
        finally:
            self._abort_uid(uid)

    # -- state

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def meter(self) -> Measurements:
        return self._meter

    def room(self) -> int:
        if self._dead:
            return 0
        stats = self._stats
        slots = self._config.max_num_seqs - len(self._tickets)
        # A newcomer will want about as many blocks as those that run now.
        typical = max(1, -(-stats.kv_blocks_used // stats.running)) if stats.running else 1
        not_yet_running = max(0, len(self._tickets) - stats.running)
        fitting = (stats.kv_blocks_total - stats.kv_blocks_used) // typical - not_yet_running
        return max(0, min(slots, fitting))

    # -- inside, on the event loop

    def _submit(self, request: EngineRequest, stream: _Stream | None) -> int:
        if self._dead:
            raise self._dead
        if request.request_id in self._live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use")
        uid = next(self._uids)
        sequence = self.limits.admit(request, uid)
        self._live[request.request_id] = uid
        self._tickets[uid] = _Ticket(request.request_id, stream)
        self._commands.put(lambda core: core.add(sequence))
        return uid

    def _abort_uid(self, uid: int) -> None:
        ticket = self._tickets.get(uid)
        if ticket is None:
            return
        if self._live.get(ticket.request_id) == uid:
            del self._live[ticket.request_id]
        self._commands.put(lambda core: core.abort(uid))

    def _deliver(self, step: Step) -> None:
        self._stats = step.stats
        followed = any(ticket.stream is None for ticket in self._tickets.values())
        mine: list[RequestOutput] = []
        for uid, output in step.outputs:
            ticket = self._tickets[uid]
            if output.finish is not None:
                del self._tickets[uid]
                if self._live.get(ticket.request_id) == uid:
                    del self._live[ticket.request_id]
            if ticket.stream is None:
                mine.append(output)
            else:
                ticket.stream.put_nowait(output)
        if followed:
            self._steps.put_nowait(StepOutputs(mine, step.stats))

    def _die(self, error: BaseException) -> None:
        self._dead = EngineDead(f"the engine's loop ended: {type(error).__name__}: {error}")
        for ticket in self._tickets.values():
            if ticket.stream is not None:
                ticket.stream.put_nowait(self._dead)
        self._tickets.clear()
        self._live.clear()
        self._steps.put_nowait(self._dead)

    def _become_ready(self, built: Built, stats: EngineStats, ready: asyncio.Future[None]) -> None:
        self._admission, self._meter = built.admission, built.core.meter
        self._stats, self._dead = stats, None
        ready.set_result(None)

    # -- inside, on the engine's thread

    def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            built = build(self._config)
        except BaseException as error:
            self._post(ready.set_exception, error)
            return
        core = built.core
        self._post(self._become_ready, built, core.stats(), ready)
        try:
            while self._obey(core):
                if core.has_work:
                    self._post(self._deliver, core.step())
            core.abort_all()
            self._post(self._deliver, core.step())
        except BaseException as error:
            log.exception("engine.dead")
            self._post(self._die, error)
        finally:
            core.device.close()

    def _obey(self, core: EngineCore) -> bool:
        """Runs all commands that are there, waits for one if there is no work. False: stop."""
        wait = not core.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command(core)
            wait = False

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        # A loop that was closed without `stop` has nobody left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)


async def _shaped(stream: _Stream, kind: OutputKind) -> AsyncIterator[RequestOutput]:
    """The stream's deltas as `kind` wants them, to the one that finishes."""
    token_ids: list[int] = []
    text = ""
    logprobs: list[PositionLogprobs] = []
    prompt_logprobs: Sequence[PositionLogprobs] | None = None
    first: int | None = None
    while True:
        delta = await stream.get()
        if isinstance(delta, EngineFailure):
            raise delta
        if kind is OutputKind.DELTA:
            yield delta
        else:
            first = delta.seq if first is None else first
            token_ids += delta.token_ids
            text += delta.text
            logprobs += delta.logprobs or ()
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            if kind is OutputKind.CUMULATIVE or delta.finish is not None:
                reported = None if delta.logprobs is None else list(logprobs)
                yield RequestOutput(
                    delta.request_id,
                    first,
                    list(token_ids),
                    text,
                    reported,
                    delta.finish,
                    prompt_logprobs,
                )
        if delta.finish is not None:
            return
