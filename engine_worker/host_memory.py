"""Whether a model fits beside what a process already serves.

Asked before it is loaded: where it does not fit the kernel kills the process, with every model in it.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Final

import psutil

from engine_worker.config import EngineConfig

_KEPT_BYTES: Final = {"fp32": 0, "fp16": 2, "int8": 1}
"""Per weight, of the packed copy that is made beside the weights as they were read."""
_READ_BYTES: Final = 4
"""Weights are read as float32."""
_HEADER_MAX: Final = 100 << 20
"""What the safetensors library itself takes for a header at most."""
_CGROUP: Final = Path("/sys/fs/cgroup")


class NotEnoughMemory(ValueError):
    """The message says what the model needs and what there is."""


def refuse_what_does_not_fit(config: EngineConfig) -> None:
    """Raises NotEnoughMemory. Only for the CPU: a GPU's memory is measured while the model is laid out."""
    if config.device != "cpu":
        return
    need, free = bytes_needed(config), available_bytes()
    if need > free:
        raise NotEnoughMemory(
            f"not enough memory: while it is loaded it needs {need >> 20} MiB, keys and values included, "
            f"and {free >> 20} MiB are free"
        )


def bytes_needed(config: EngineConfig) -> int:
    """At the most while it is loaded."""
    weights = sum(_weights_in(path) for path in sorted(config.model_dir.glob("*.safetensors")))
    return weights * (_READ_BYTES + _KEPT_BYTES[config.precision]) + config.kv_cache_memory


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Of the machine, or of the container where that has less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # The kernel gives up files' pages before it kills.
        return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no such limit: "max"
        return free


def _weights_in(path: Path) -> int:
    """Numbers in a safetensors file, by its header (https://github.com/huggingface/safetensors#format).

    0 where it has none that can be read: the loader says what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _HEADER_MAX)))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return 0
