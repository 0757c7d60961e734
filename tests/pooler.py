"""A real PgBouncer before the tests' PostgreSQL, which lends another session to each transaction."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import psycopg

PGBOUNCER = shutil.which(
    "pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/opt/homebrew/bin"
)
_SESSIONS = 3


@contextmanager
def pooler(
    database: dict[str, Any], home: Path, *, mode: Literal["transaction", "session"]
) -> Iterator[dict[str, Any]]:
    """Django's settings of that database through a pooler of few sessions, each in turn: never the last one."""
    assert PGBOUNCER
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = f"host={database['HOST'] or 'localhost'} port={database['PORT'] or 5432}"
    if database["PASSWORD"]:
        server += f" password={database['PASSWORD']}"
    sessions = _SESSIONS if mode == "transaction" else 50
    config = home / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = {server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"unix_socket_dir =\nauth_type = trust\nauth_file = {home}/users\npool_mode = {mode}\n"
        f"default_pool_size = {sessions}\nmax_client_conn = 200\nserver_round_robin = 1\nlogfile =\n"
    )
    (home / "users").write_text(f'"{database["USER"]}" ""\n"weir_gateway" "secret"\n')
    as_root = os.geteuid() == 0
    if as_root:
        for path in (home, *home.iterdir()):
            path.chmod(0o755)
    with (home / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [PGBOUNCER, *(["-u", "nobody"] if as_root else []), str(config)], stdout=log, stderr=log
        )
    pooled = {**database, "HOST": "127.0.0.1", "PORT": str(port)}
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                connect(pooled).close()
                break
            except psycopg.OperationalError:
                assert process.poll() is None, (home / "pgbouncer.log").read_text()
                assert time.monotonic() < deadline, (home / "pgbouncer.log").read_text()
                time.sleep(0.05)
        if mode == "transaction":
            _open_sessions(pooled)
        yield pooled
    finally:
        process.kill()
        process.wait(10)


def _open_sessions(database: dict[str, Any]) -> None:
    """All of them: it makes one when none is free, and in turn only goes what is there."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(database)) for _ in range(_SESSIONS)]
        for statement in ("BEGIN", "COMMIT"):
            for client in clients:
                client.execute(statement)


def connect(database: dict[str, Any]) -> psycopg.Connection[Any]:
    return psycopg.connect(
        host=database["HOST"], port=database["PORT"], dbname=database["NAME"], user=database["USER"],
        password=database["PASSWORD"] or None, autocommit=True, connect_timeout=5, prepare_threshold=None,
    )  # fmt: skip
