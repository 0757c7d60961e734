"""Runs commands as children, prefixes their output, restarts what ends, stops everything in order.

Why not circus, supervisord or honcho: docs/adr/0002-supervisor.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from weir.children import ChildrenFile
from weir.errors import StartError
from weir.process import Command

_BACKOFF_MIN_S: Final = 0.5
_BACKOFF_MAX_S: Final = 30.0
_STEADY_S: Final = 60.0
"""A child that ran for so long has recovered: its next restart is quick again."""
_STARTS_BEFORE_GIVING_UP: Final = 4
_LAST_WORDS_S: Final = 1.0
_CHUNK: Final = 65536
_TELL_EVERY_S: Final = 15.0
_EVENT: Final = re.compile(r'\bevent(?:=|": ?")(\w+)')
"""Of a log line, as key=value or JSON."""


def backoff_s(failures: int) -> float:
    """Seconds to wait before the next start after so many failures in a row."""
    return float(min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2 ** max(0, failures - 1)))


class Child:
    """One supervised command, over all its restarts."""

    def __init__(self, command: Command, write: Callable[[str, str], None], children: ChildrenFile) -> None:
        self.command = command
        self.starts = 0
        self.stage = ""
        """What it is at before it serves, one of `command.stages`: for as long as it takes."""
        self.stage_began = 0.0
        self._write = write
        self._children = children
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._failures = 0
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise-{command.name}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def stop(self) -> None:
        """Asks it to stop, kills it when its grace is over, and returns when nothing of it is left.

        Asks once: to many programs a second signal says to leave everything as it is.
        """
        is_asked = self._stopping.is_set()
        self._stopping.set()
        process = self._process
        if process and process.returncode is None:
            if not is_asked:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(self.command.stop_signal)
            try:
                async with asyncio.timeout(self.command.stop_grace_s):
                    await asyncio.shield(self._task)
            except TimeoutError:
                self._write(
                    self.command.name, f"does not stop within {self.command.stop_grace_s:g} s: killed"
                )
                _kill_group(process.pid)
        await self._task

    async def _keep_running(self) -> None:
        while not self._stopping.is_set():
            code, ran_s = await self._run_once()
            if self._stopping.is_set():
                return
            self._failures = 1 if ran_s > _STEADY_S else self._failures + 1
            pause_s = backoff_s(self._failures)
            self._write(self.command.name, f"{_describe(code)}; starts again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _run_once(self) -> tuple[int, float]:
        self.starts += 1
        self.stage = ""
        started = time.monotonic()
        # A session of its own: Ctrl-C reaches the supervisor alone, which stops everything in order.
        process = self._process = await asyncio.create_subprocess_exec(
            *self.command.wrapped(),
            env=self.command.environ(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._children.add(process.pid, self.command.name)
        output = asyncio.create_task(self._copy_output(process), name=f"output-{self.command.name}")
        if self._stopping.is_set():  # stop came while it was being started
            process.send_signal(self.command.stop_signal)
        code = await process.wait()
        _kill_group(process.pid)  # what it left behind would hold its sockets, and the pipe, open
        done, _ = await asyncio.wait([output], timeout=_LAST_WORDS_S)
        if not done:
            output.cancel()
        self._children.remove(process.pid)
        return code, time.monotonic() - started

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _CHUNK:  # a line without end
                lines.append(rest)
                rest = b""
            for line in lines:
                self._hear(line.decode("utf-8", "replace").rstrip("\r"))
        if rest:
            self._hear(rest.decode("utf-8", "replace"))

    def _hear(self, line: str) -> None:
        self._write(self.command.name, line)
        if (event := _EVENT.search(line)) and event[1] in self.command.stages:
            self.stage, self.stage_began = self.command.stages[event[1]], time.monotonic()


class Supervisor:
    """The children, in the order in which they were started; they stop in the reverse order, by stage."""

    def __init__(self, children_file: ChildrenFile, *, names: Iterable[str] = ()) -> None:
        self._children_file = children_file
        self._stages: list[list[Child]] = []
        self._width = max((len(name) for name in names), default=0)
        self._stopped = False

    def start(self, *commands: Command, outlives_last: bool = False) -> list[Child]:
        """Starts commands that may stop together: one stage. Later stages stop first.

        `outlives_last` puts this stage below the one started last: what finishes its work on the way out
        (an engine with open streams) needs those who carry it to the client until then.
        """
        if self._stopped:
            raise StartError("stopped while starting")
        stage = [Child(command, self.write, self._children_file) for command in commands]
        self._stages.insert(len(self._stages) - bool(outlives_last), stage)
        return stage

    async def stop(self) -> None:
        self._stopped = True
        while self._stages:
            # Not gather: each child's end must be waited for, whatever happens to another's.
            await asyncio.wait([asyncio.create_task(child.stop()) for child in self._stages[-1]])
            self._stages.pop()
        self._children_file.clear()

    async def until(
        self,
        ready: Callable[[], Awaitable[bool]],
        *,
        what: str,
        timeout_s: float,
        at_most_s: float = float("inf"),
        advice: str = "see the lines above",
        tell_every_s: float = _TELL_EVERY_S,
    ) -> None:
        """Waits until `ready` says so, and tells what for.

        The time in which a child is at one of its stages does not count, up to `at_most_s` in all. Raises
        StartError with `advice` when it takes too long, or when a child keeps ending.
        """
        began = looked = told = time.monotonic()
        counted_s = 0.0
        while not await ready():
            children = [child for stage in self._stages for child in stage]
            for child in children:
                if child.starts >= _STARTS_BEFORE_GIVING_UP and child.pid is None:
                    raise StartError(f"{child.command.name} does not start: see its lines above")
            now = time.monotonic()
            busy = next((child for child in children if child.pid and child.stage), None)
            if busy is None:
                counted_s += now - looked
            looked = now
            if counted_s > timeout_s or now - began > at_most_s:
                raise StartError(f"{what} is not ready after {now - began:.0f} s: {advice}")
            if now - told >= tell_every_s:
                told = now
                if busy:
                    self.write(busy.command.name, f"{busy.stage}: {now - busy.stage_began:.0f} s so far")
                else:
                    self.write("weir", f"waiting for {what}: {now - began:.0f} s so far")
            await asyncio.sleep(0.1)

    def write(self, name: str, line: str) -> None:
        # A terminal that is gone must not take the product down with it.
        with contextlib.suppress(OSError, ValueError):
            print(f"{name:<{self._width}} | {line}", file=sys.stderr, flush=True)


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
