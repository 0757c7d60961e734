"""Runs a core step by step, without threads, and collects what comes out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_worker.engine.build import Built
from engine_worker.engine.types import EngineRequest, RequestOutput
from engine_worker.protocol import Finish, SamplingParams


def request(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> EngineRequest:
    """Greedy and deaf to end tokens, unless said otherwise. Sampling fields may be given by name."""
    fields = {name: changes.pop(name) for name in list(changes) if name in EngineRequest.__dataclass_fields__}
    sampling = {"temperature": 0.0, "ignore_eos": True, **changes}
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling), **fields)


@dataclass
class Collected:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[RequestOutput] = field(default_factory=list)
    finish: Finish | None = None


class Driver:
    """Adds, aborts and steps; checks after each step that no block is lost and no token out of order."""

    def __init__(self, built: Built) -> None:
        self.core, self.admission = built.core, built.admission
        self.results: dict[str, Collected] = defaultdict(Collected)
        self._uids = itertools.count(1)
        self._names: dict[int, str] = {}

    def add(self, request: EngineRequest) -> int:
        uid = next(self._uids)
        self.core.add(self.admission.admit(request, uid))
        self._names[uid] = request.request_id
        return uid

    def step(self) -> None:
        for uid, output in self.core.step().outputs:
            result = self.results[self._names[uid]]
            assert result.finish is None, "an output came after the last"
            result.pieces.append(output)
            result.token_ids += output.token_ids
            result.text += output.text
            result.finish = output.finish
        self.core.check()

    def run(self, requests: Iterable[EngineRequest] = (), *, max_steps: int = 2000) -> dict[str, Collected]:
        for item in requests:
            self.add(item)
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.results
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def run_tokens(built: Built, *requests: EngineRequest) -> list[list[int]]:
    results = Driver(built).run(requests)
    return [results[item.request_id].token_ids for item in requests]
