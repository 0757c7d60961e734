"""A command that somebody supervises."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_CHILD: Final = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, as whom, and how to ask it to stop."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = field(default=None, repr=False)
    """The whole environment; None is this process's own."""
    user: tuple[int, int] | None = None
    """(uid, gid) to run as; only root can ask for it."""
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = 15.0
    """After the stop signal, so long until it is killed."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Events of its log that say what it is at before it serves, in words; an empty word: it is done with that."""

    def wrapped(self) -> list[str]:
        """The command line that runs it through child.py, so that it does not outlive this process."""
        user = f"{self.user[0]}:{self.user[1]}" if self.user else "-"
        return [
            sys.executable,
            "-I",
            "-S",
            str(_CHILD),
            str(os.getpid()),
            str(int(self.stop_signal)),
            user,
            *self.argv,
        ]

    def environ(self) -> dict[str, str]:
        environ = dict(os.environ if self.env is None else self.env)
        if self.cwd:
            environ["WEIR_CHILD_CWD"] = str(self.cwd)
        return environ
