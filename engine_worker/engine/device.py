"""Where steps are computed, one after the other: launched by the loop, which may meanwhile do something else.

A device keeps the order in which things were launched. So blocks may be given to the next sequence while
a step in flight still writes to them: whatever the next one writes comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from engine_worker.engine.executor import Executor, Result
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.swap import Move

_T = TypeVar("_T")


class Flight(Protocol):
    """A step that was launched. `concurrent.futures.Future` is one."""

    def result(self) -> list[Result]:
        """Waits; one per item of the plan. Raises what the step failed with."""


class Device(Protocol):
    def launch(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> Flight:
        """`moves` are made first, whatever becomes of the step."""

    def scrub(self, blocks: Rows[int]) -> None:
        """After all that is launched: overwrites KV blocks that may hold NaN."""

    def close(self) -> None:
        """Nothing will be launched any more. Idempotent."""


class InlineDevice:
    """Computes a step when it is launched: there is no overlap."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def launch(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> Flight:
        return self._run(lambda: self.executor.run(plan, moves))

    def scrub(self, blocks: Rows[int]) -> None:
        self._run(lambda: self.executor.runner.scrub(blocks)).result()

    def close(self) -> None:
        self.executor.runner.close()

    def _run(self, work: Callable[[], _T]) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


class ThreadDevice(InlineDevice):
    """Computes in a thread of its own. The kernels hold no lock of Python's, so the loop goes on beside them."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._thread = ThreadPoolExecutor(1, "weir-device")

    def close(self) -> None:
        # A step that hangs is not waited for.
        self._thread.submit(self.executor.runner.close)
        self._thread.shutdown(wait=False)

    def _run(self, work: Callable[[], _T]) -> Future[_T]:
        return self._thread.submit(work)
