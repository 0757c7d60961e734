"""What one engine did in one round, and the medians over rounds."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """Times in seconds from the common start."""

    wall_s: float
    outputs: list[list[int]]
    finished_s: list[float]
    first_token_s: list[float] | None = None
    peak_memory_mb: float | None = None
    """Of the engine's process, since it began."""
    cached_tokens: int = 0
    """Prompt tokens that a prefix cache held. This and what follows: ours alone, over all requests."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens that were asked for: the padding of static batching counts as time."""
        return sum(map(len, self.outputs)) / self.wall_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens of a request, the median of the requests."""
        if self.first_token_s is None:
            return None
        rows = zip(self.finished_s, self.first_token_s, self.outputs, strict=True)
        gaps = [(end - first) / (len(tokens) - 1) for end, first, tokens in rows if len(tokens) > 1]
        return statistics.median(gaps) if gaps else None


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summarise(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over the rounds."""
    median = statistics.median
    summary = {
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 2),
        "wall_s": round(median(run.wall_s for run in runs), 2),
        "latency_p50_s": round(median(percentile(run.finished_s, 0.5) for run in runs), 2),
        "latency_p99_s": round(median(percentile(run.finished_s, 0.99) for run in runs), 2),
    }
    firsts = [run.first_token_s for run in runs if run.first_token_s]
    if firsts:
        summary["ttft_p50_s"] = round(median(percentile(first, 0.5) for first in firsts), 2)
        summary["ttft_p99_s"] = round(median(percentile(first, 0.99) for first in firsts), 2)
    gaps = [gap for run in runs if (gap := run.itl_s) is not None]
    if gaps:
        summary["itl_ms"] = round(1000 * median(gaps), 1)
    memory = [run.peak_memory_mb for run in runs if run.peak_memory_mb]
    if memory:
        summary["peak_memory_mb"] = round(max(memory))
    return summary


def processor() -> str:
    """The CPU's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
