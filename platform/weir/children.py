"""Which processes belong to this installation, on disk, so that a start after a crash ends what was left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil


class ChildrenFile:
    """The running children, in a file that is rewritten with each change.

    A process is told by its number and its start time: numbers are used again, also by strangers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._children: dict[int, tuple[str, float]] = {}

    def add(self, pid: int, name: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._children[pid] = (name, psutil.Process(pid).create_time())
            self._save()

    def remove(self, pid: int) -> None:
        self._children.pop(pid, None)
        self._save()

    def clear(self) -> None:
        self._children.clear()
        self._path.unlink(missing_ok=True)

    def end_leftovers(self, *, grace_s: float = 10.0) -> list[str]:
        """Ends the children of a supervisor that was killed; their names. The caller holds the installation's lock."""
        left: list[tuple[str, psutil.Process]] = []
        try:
            recorded = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            recorded = []
        for pid, name, created_at in recorded:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if abs(process.create_time() - created_at) < 0.1:
                    left.append((name, process))
        for _, process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs([process for _, process in left], timeout=grace_s)
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=5)
        self.clear()
        return [name for name, _ in left]

    def _save(self) -> None:
        draft = self._path.with_suffix(".new")
        rows = [(pid, name, created_at) for pid, (name, created_at) in self._children.items()]
        # A full disk must not end the product: without the file a crash leaves more to clean up by hand.
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(rows), encoding="utf-8")
            draft.replace(self._path)
