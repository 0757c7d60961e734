"""A request of the worker's own, to learn whether an idle engine still computes. A port that answers proves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine_worker.engine.errors import EngineDead
from engine_worker.engine.types import Engine, EngineRequest, EngineStats, RequestOutput
from engine_worker.protocol import FinishReason, SamplingParams

_PREFIX = "weir-canary-"


class Canary:
    """`after_s`: idle for so long, the engine is asked for a token. `patience_s`: so long it may take."""

    def __init__(
        self,
        engine: Engine,
        *,
        after_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._after_s = after_s
        self._patience_s = patience_s
        self._clock = clock
        self._quiet_since = clock()
        self._asked: str | None = None
        self._count = 0

    def watch(self, stats: EngineStats) -> None:
        """Call regularly. Raises EngineDead when an answer is overdue."""
        now = self._clock()
        if self._asked is not None:
            if now - self._quiet_since > self._patience_s:
                raise EngineDead(f"an idle engine made no token within {self._patience_s:g} s")
        elif stats.running or stats.waiting:
            self._quiet_since = now
        elif now - self._quiet_since >= self._after_s:
            self._count += 1
            self._asked = f"{_PREFIX}{self._count}"
            self._quiet_since = now
            self._engine.add(EngineRequest(self._asked, [0], SamplingParams(max_tokens=1, temperature=0.0)))

    def hear(self, outputs: Iterable[RequestOutput]) -> None:
        """Looks for its answer. Raises EngineDead when that is an error."""
        for output in outputs:
            if output.request_id != self._asked or output.finish is None:
                continue
            if output.finish.reason == FinishReason.ERROR:
                raise EngineDead(f"the engine fails on a request of one token: {output.finish.error}")
            self._asked, self._quiet_since = None, self._clock()
