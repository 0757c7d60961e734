"""Where the embedded servers live: known from `var/` alone, so that every process finds them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

_SOCKET_PATH_MAX: Final = 100
"""sockaddr_un holds 108 bytes on Linux and 104 on macOS."""
_FINGERPRINT: Final = 12
_LONGEST_SOCKET: Final = len("/postgres/.s.PGSQL.5432.lock")


def fingerprint(var_dir: Path) -> str:
    """Tells installations apart where they share a directory."""
    return hashlib.sha256(os.fsencode(var_dir.resolve())).hexdigest()[:_FINGERPRINT]


def socket_dir(var_dir: Path) -> Path:
    """Under `var/` where that works; under /tmp where the path is too long for a socket, or started by root.

    (As root PostgreSQL runs as another user, who may not be able to reach `var/`.)
    """
    inside = var_dir.resolve() / "run"
    fits = len(os.fsencode(inside)) + _LONGEST_SOCKET <= _SOCKET_PATH_MAX and "," not in str(inside)
    if fits and os.geteuid() != 0:
        return inside
    return _temporary() / f"weir-{os.geteuid()}-{fingerprint(var_dir)}"


def temporary_socket_dirs() -> list[Path]:
    """Those of this user under /tmp, of whatever installation."""
    return [path for path in _temporary().glob(f"weir-{os.geteuid()}-*") if is_temporary(path)]


def is_temporary(directory: Path) -> bool:
    name = rf"weir-{os.geteuid()}-[0-9a-f]{{{_FINGERPRINT}}}"
    return directory.parent == _temporary() and re.fullmatch(name, directory.name) is not None


def _temporary() -> Path:
    return Path("/tmp").resolve()  # noqa: S108 - owners are checked


def postgres_socket_dir(var_dir: Path) -> Path:
    return socket_dir(var_dir) / "postgres"


def valkey_socket(var_dir: Path) -> Path:
    return socket_dir(var_dir) / "valkey.sock"


def database_url(var_dir: Path) -> str:
    return f"postgres://weir@{quote(str(postgres_socket_dir(var_dir)), safe='')}/postgres"


def redis_url(var_dir: Path) -> str:
    return f"unix://{quote(str(valkey_socket(var_dir)))}"
