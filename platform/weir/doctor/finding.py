"""What an examination finds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["ok", "warning", "error"]
TIMEOUT_S: Final = 3.0
"""Whatever is asked answers within it, or counts as away."""
RESTART: Final = "On one machine `make run` starts it; otherwise see docs/operations.md."


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    part: str
    text: str
    what_to_do: str = ""


def reporting(check: Callable[[], Iterator[Finding]]) -> Generator[Finding, None, bool]:
    """Passes findings on; returns whether none was an error."""
    is_fine = True
    for finding in check():
        is_fine &= finding.level != "error"
        yield finding
    return is_fine
