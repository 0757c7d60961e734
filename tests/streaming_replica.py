"""A real streaming replica of the tests' PostgreSQL: made by pg_basebackup, a hot standby beside it on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.conf import settings

from weir import embedded
from weir.embedded import Server
from weir.process import Command

PORT = 5432


@dataclass
class Replica:
    server: Server
    sockets: Path
    process: subprocess.Popen[bytes]

    def url(self, database: str) -> str:
        return f"{self.server.url.rpartition('/')[0]}/{database}"

    def say(self, statement: str) -> Any:
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            row = connection.execute(statement).fetchone()
        return row[0] if row else None

    def kill(self) -> None:
        """As a lost machine: all of its processes at once."""
        family = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
        self.process.wait(10)

    def start_again(self) -> None:
        with suppress(FileNotFoundError):
            (Path(self.server.command.argv[2]) / "postmaster.pid").unlink()
        self.process = embedded.start(self.server)


@contextmanager
def streaming_replica() -> Iterator[Replica]:
    """Of the server of DATABASE_URL; skips the test where that is not on this machine."""
    with psycopg.connect(settings.DATABASE_URL, autocommit=True) as primary:
        row = primary.execute("SELECT setting FROM pg_config WHERE name = 'BINDIR'").fetchone()
        place, user = primary.info.host, primary.info.user
        port = primary.info.port
    assert row is not None
    programs = Path(row[0])
    if not place.startswith("/") or not (programs / "postgres").exists():
        pytest.skip("the tests' PostgreSQL is on another machine")
    home = Path(tempfile.mkdtemp(prefix="weir-replica-"))
    owner = _owner_of(Path(place))
    try:
        data, sockets = home / "data", home / "s"
        sockets.mkdir()
        connection = f"host={place} port={port} user={user}"
        subprocess.run(
            [str(programs / "pg_basebackup"), "-d", connection, "-D", str(data), "-R", "-X", "stream",
             "--checkpoint=fast", "--no-sync"],
            check=True, timeout=120, capture_output=True, cwd="/",
        )  # fmt: skip
        for path in (home, *home.rglob("*")):
            os.chown(path, *owner)
        argv = [str(programs / "postgres"), "-D", str(data), "-k", str(sockets)]
        for option in ("listen_addresses=", "fsync=off", "hot_standby=on", f"port={PORT}"):
            argv += ["-c", option]
        command = Command(
            "replica", tuple(argv), env={"PATH": os.defpath, "LC_ALL": "C"}, cwd=Path("/"),
            user=owner if os.geteuid() == 0 else None, stop_signal=signal.SIGINT,
        )  # fmt: skip
        url = f"postgres://{user}@{str(sockets).replace('/', '%2F')}:{PORT}/postgres"
        server = Server(command, url)
        replica = Replica(server, sockets, embedded.start(server))
        try:
            until(lambda: replica.say("SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'"))
            yield replica
        finally:
            with suppress(psutil.NoSuchProcess):
                replica.kill()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def until(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)


def _owner_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid
