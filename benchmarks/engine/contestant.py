"""One engine in a process of its own, told by lines of JSON what to run.

Engines in one process disturb each other: a second OpenMP team and another model's memory cost ours
a third to a half of its speed. Between its turns a contestant waits for input and uses nothing.

Run as `python -m benchmarks.engine.contestant ENGINE OPTIONS`, with the interpreter of the engine's
own virtual environment: this module and what it imports need the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Options:
    model_dir: str
    threads: int
    precision: str
    cache_dir: str = ""
    """Where an engine that needs the weights in another format keeps them."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig: of ours alone."""


Engine = Callable[[Sequence[Chat]], Run]


class Contestant:
    """The parent's side. `module`: one of `benchmarks.engine.engines`."""

    def __init__(self, module: str, options: Options, python: Path) -> None:
        self._module = module
        # OpenMP's own defaults: each engine sets what it needs in its process.
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.engine.contestant", module, json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )

    def run(self, chats: Sequence[Chat]) -> Run:
        """Raises RuntimeError when the engine's process ends instead of answering."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and answers nothing
            print(json.dumps([asdict(chat) for chat in chats]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._module} ended with exit code {self._process.wait()}, see above")
        return Run(**json.loads(answer))

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what its process has not read any more
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """The contestant's side."""
    module, options = sys.argv[1], Options(**json.loads(sys.argv[2]))
    # Libraries print what they like: the answers keep a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start: Callable[[Options], Engine] = importlib.import_module(f"benchmarks.engine.engines.{module}").start
    engine = start(options)
    for line in sys.stdin:
        made = engine([Chat(**chat) for chat in json.loads(line)])
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1024 if sys.platform == "linux" else 1 << 20
        )
        print(json.dumps({**asdict(made), "peak_memory_mb": peak_mb}), file=answers, flush=True)


if __name__ == "__main__":
    main()
