"""Of several processes that start on a new machine one compiles the kernels, and the others wait for what it leaves."""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Final

import llvmlite.binding
import numba
import structlog

from engine_worker.starting import compiling_kernels

log = structlog.get_logger(__name__)

_PATIENCE_S: Final = 600.0
"""Compiling takes a minute or two on one core."""
_LOOK_EVERY_S: Final = 0.1
_SOURCES: Final = Path(__file__).parent


@contextmanager
def compiling(directory: Path | None = None, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Around the import that compiles. Held by nobody where this machine's code is in the cache already.

    The kernel drops the lock with the process that held it. Who has waited `patience_s` compiles as well: slow is
    better than never.
    """
    directory = directory or Path(numba.config.CACHE_DIR)
    is_done = directory / f"compiled-{_named()}"
    lock: IO[str] | None = None
    stage: AbstractContextManager[None] = compiling_kernels()
    try:
        if is_done.exists():
            stage = nullcontext()
        else:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / ".compiling.lock").open("w")
    except OSError as error:  # numba can't keep anything there either
        log.warning("kernels_are_not_kept", directory=str(directory), error=str(error))
    if lock is None:
        with stage:
            yield
        return
    with lock, stage:
        began = time.monotonic()
        _take(lock, patience_s)
        if not is_done.exists():
            log.info("kernels_compiling", directory=str(directory))
        yield
        is_done.touch()
        log.info("kernels_ready", after_s=round(time.monotonic() - began, 1))


def _take(lock: IO[str], patience_s: float) -> None:
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited_s = time.monotonic() - began
        if not is_told:
            is_told = True
            log.info("kernels_compiled_by_another", wait_at_most_s=patience_s)
        if waited_s >= patience_s:
            log.warning("kernels_waited_in_vain", after_s=round(waited_s))
            return
        time.sleep(_LOOK_EVERY_S)


def _named() -> str:
    """As numba finds what it has: by processor, for a cache may be on a disk that several share, and by where a
    source lies, its time and its size. Another checkout of the same sources compiles for itself."""
    features = llvmlite.binding.get_host_cpu_features().flatten()
    name = hashlib.sha256(f"{llvmlite.binding.get_host_cpu_name()}{features}".encode())
    for source in sorted(_SOURCES.glob("*.py")):
        stat = source.stat()
        name.update(f"{source.absolute()} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    return name.hexdigest()[:16]
