"""Measuring, and the table that comes of it."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


def seconds(
    run: Callable[[], object], device: torch.device, *, groups: int = 5, target_s: float = 0.15
) -> float:
    """Median time of one call, over groups of calls that last `target_s` each: a launch alone is too short to time."""
    run()  # compiles
    once = _timed(run, device, 1)
    calls = max(1, min(200, int(target_s / max(once, 1e-6))))
    if device.type == "cpu":
        groups, calls = 2, 1
    return statistics.median(_timed(run, device, calls) / calls for _ in range(groups))


def _timed(run: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_room() -> None:
    """Gives back the memory of decoders that are gone: their graphs hold themselves until somebody looks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Report:
    """Rows as they are measured. A part that fails or finds no time left is a row too, and the rest goes on."""

    budget_s: float
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    failed: bool = False
    _began: float = field(default_factory=time.perf_counter)
    _running: str = ""

    def add(self, what: str, case: str, value: str, compared: str = "") -> None:
        self.rows.append((what, case, value, compared))
        print("  ".join(filter(None, self.rows[-1])), flush=True)

    def part(self, name: str, run: Callable[[], None], *, required: bool = True) -> None:
        """`required`: whether a failure is ours; that of another's library is only noted."""
        if time.perf_counter() - self._began > self.budget_s:
            self.add(name, "", "skipped", "no time left")
            return
        outer, self._running = self._running, name
        try:
            run()
        except Exception as error:  # the table is worth more than a traceback
            self.failed |= required
            message = " ".join(f"{type(error).__name__}: {error}".split())
            self.add(name, "", "FAILED" if required else "not available", message[:160])
        self._running = outer
        make_room()

    @contextmanager
    def ended_after(self, seconds: float) -> Iterator[None]:
        """What hangs then, in the device's driver maybe, goes with the process; the table comes before."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        self.add(self._running, "", "FAILED", "was not done when the time was up")
        print(f"\n{self.table()}", flush=True)
        os._exit(1)

    def table(self) -> str:
        header = ("what", "case", "measured", "compared")
        widths = [max(len(row[i]) for row in [header, *self.rows]) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, tuple("-" * width for width in widths), *self.rows]
        ]
        return "\n".join(lines)
