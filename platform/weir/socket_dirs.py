"""The embedded servers' socket directories under /tmp: each is held by who uses it, and goes with the last one.

Held is locked (flock on the directory itself), which the kernel undoes however a process ends. What a crash left is
removed by the next start of any installation of the same user. Those under `var/` stay: they are part of it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from weir import places

_SETTLED_S: Final = 600.0
"""Younger ones are let be: an earlier release holds none, and makes its database before its sockets."""
_held: dict[Path, int] = {}
"""This process's, with the open descriptor that has the lock."""


def hold(directory: Path, make: Callable[[], None]) -> None:
    """Makes the directory (`make` does), and keeps it until this process ends. Removes what others left behind."""
    if not places.is_temporary(directory):
        make()
        return
    while not _is_held(directory):
        if (gone := _held.pop(directory, None)) is not None:
            os.close(gone)
        make()
        with suppress(FileNotFoundError):  # removed just now by somebody's start: once more
            descriptor = _held[directory] = _open(directory)
            # Whoever is removing it has it locked, and then this descriptor is of what is there no more.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    _remove_stale()


def _is_held(directory: Path) -> bool:
    descriptor = _held.get(directory)
    if descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), directory.lstat())
    except FileNotFoundError:
        return False


def _remove_stale() -> None:
    for directory in places.temporary_socket_dirs():
        with suppress(OSError):  # not ours, or gone meanwhile
            if directory not in _held and time.time() - directory.lstat().st_mtime > _SETTLED_S:
                descriptor = _open(directory)
                try:
                    _remove_unused(directory, descriptor)
                finally:
                    os.close(descriptor)


@atexit.register
def _leave() -> None:
    for directory, descriptor in _held.items():
        with suppress(OSError):
            if _is_held(directory):
                _remove_unused(directory, descriptor)


def _remove_unused(directory: Path, descriptor: int) -> None:
    """Raises BlockingIOError where another process holds it. A server that a crash left running keeps its own."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not any(_answers(path) for path in directory.rglob("*") if path.is_socket()):
        shutil.rmtree(directory, ignore_errors=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or not ours to ask
    return True


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
