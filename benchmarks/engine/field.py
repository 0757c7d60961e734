"""The engines that a call compares, each in a process of its own, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.engine import workload
from benchmarks.engine.contestant import Contestant
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat

Start = Callable[[], Contestant]


class Field:
    """Engines by name. Those of `required` that end are an error; others are left out from then on, and named.

    `one_at_a_time`: each is started for its turn and ends with it, where memory doesn't hold all of them.
    """

    def __init__(self, starts: Mapping[str, Start], required: Sequence[str], one_at_a_time: bool) -> None:
        self._starts, self._required = dict(starts), required
        self._one_at_a_time = one_at_a_time
        self._waiting: dict[str, Contestant] = {}

    @property
    def names(self) -> list[str]:
        return list(self._starts)

    def run(self, chats: Sequence[Chat]) -> dict[str, Run]:
        """In turn."""
        if not self._one_at_a_time:
            self._start_all()
        made = {}
        for name in self.names:
            try:
                made[name] = self._run_one(name, chats)
            except RuntimeError as error:
                self._leave_out(name, error)
        return made

    def stop(self) -> None:
        for contestant in self._waiting.values():
            contestant.stop()
        self._waiting.clear()

    def _start_all(self) -> None:
        """Together: all but one wait for the processor meanwhile. Then each runs a little."""
        missing = [name for name in self.names if name not in self._waiting]
        for name in missing:
            self._waiting[name] = self._starts[name]()
        for name in missing:
            try:
                _warm_up(self._waiting[name])
            except RuntimeError as error:
                self._leave_out(name, error)

    def _run_one(self, name: str, chats: Sequence[Chat]) -> Run:
        if not self._one_at_a_time:
            return self._waiting[name].run(chats)
        contestant = self._starts[name]()
        try:
            _warm_up(contestant)
            return contestant.run(chats)
        finally:
            contestant.stop()

    def _leave_out(self, name: str, error: RuntimeError) -> None:
        if name in self._required:
            raise error
        print(f"left out: {name}: {error}", flush=True)
        del self._starts[name]
        if (ended := self._waiting.pop(name, None)) is not None:
            ended.stop()


def _warm_up(contestant: Contestant) -> None:
    """A first run pays for allocations and caches: it is not counted."""
    contestant.run([Chat(chat.prompt[:32], 4) for chat in workload.load("w20")[:4]])
