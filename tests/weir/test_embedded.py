"""The embedded servers: after crashes, under unreachable directories, under very deep ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from weir import embedded, places
from weir.embedded import Server


@pytest.fixture
def var_dir() -> Iterator[Path]:
    # Not tmp_path: pytest's directories are closed to other users, which is a case of its own below.
    path = Path(tempfile.mkdtemp(prefix="weir-embedded-"))
    path.chmod(0o755)
    yield path
    for leftover in (places.socket_dir(path), (path / "postgres").resolve(), path):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def running(server: Server) -> Iterator[subprocess.Popen[bytes]]:
    process = embedded.start(server)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(server.command.stop_signal)
        process.wait(timeout=20)


def kill_9(process: subprocess.Popen[bytes]) -> None:
    """As when the machine's memory killer takes the whole group, or the power goes."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=10)
    psutil.wait_procs(family, timeout=10)


def write_row(server: Server, value: int) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute("create table if not exists kept (value int)")
        connection.execute("insert into kept values (%s)", [value])


def rows(server: Server) -> list[int]:
    with psycopg.connect(server.url) as connection:
        return [value for (value,) in connection.execute("select value from kept order by value")]


def test_postgres_keeps_data_over_a_crash_with_stale_files(var_dir: Path):
    server = embedded.prepare_postgres(var_dir)
    with running(server) as process:
        write_row(server, 1)
        kill_9(process)
    data = (var_dir / "postgres").resolve() / "data"
    assert (data / "postmaster.pid").exists()
    # The number in it may belong to anybody by now: here, to this very test.
    content = (data / "postmaster.pid").read_text().split("\n", 1)[1]
    (data / "postmaster.pid").write_text(f"{os.getpid()}\n{content}")

    server = embedded.prepare_postgres(var_dir)
    with running(server):
        assert rows(server) == [1]


def test_a_postgres_left_running_is_stopped_first(var_dir: Path):
    left = embedded.start(embedded.prepare_postgres(var_dir))
    server = embedded.prepare_postgres(var_dir)
    assert left.wait(timeout=1) == 0
    with running(server):
        write_row(server, 2)


def test_a_first_start_that_was_killed_is_done_again(var_dir: Path):
    home = (var_dir / "postgres" / "data.new").resolve()
    home.mkdir(parents=True)
    (home / "PG_VERSION").write_text("18\n")
    server = embedded.prepare_postgres(var_dir)
    with running(server):
        write_row(server, 3)


def test_valkey_keeps_data_over_a_crash(var_dir: Path):
    server = embedded.prepare_valkey(var_dir)
    with running(server) as process, redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
        client.waitaof(1, 0, 5000)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        kill_9(process)
    assert places.valkey_socket(var_dir).exists()

    server = embedded.prepare_valkey(var_dir)
    with running(server), redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"yes"


def test_a_valkey_left_running_is_stopped_first(var_dir: Path):
    left = embedded.start(embedded.prepare_valkey(var_dir))
    server = embedded.prepare_valkey(var_dir)
    assert left.wait(timeout=1) == 0
    with running(server), redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_a_very_deep_directory_works(var_dir: Path):
    deep = var_dir.joinpath(*["a-rather-long-name-for-a-directory"] * 5)
    server = embedded.prepare_postgres(deep, durable=False)
    with running(server):
        write_row(server, 4)
    server = embedded.prepare_valkey(deep, durable=False)
    with running(server), redis.Redis.from_url(server.url) as client:
        assert client.ping()
    shutil.rmtree(places.socket_dir(deep))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_started_by_root_under_a_closed_directory(var_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a checkout, a virtual environment and a home directory below one of mode 700."""
    closed = var_dir / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(embedded, "_SYSTEM_DIR", var_dir / "system")
    monkeypatch.setattr(embedded, "_reachable", lambda _path: False)
    server = embedded.prepare_postgres(closed / "var")
    assert server.command.argv[0].startswith(str(var_dir / "system" / "postgresql-"))
    assert (closed / "var" / "postgres").is_symlink()
    with running(server):
        write_row(server, 5)
    server = embedded.prepare_postgres(closed / "var")
    with running(server):
        assert rows(server) == [5]
    shutil.rmtree(places.socket_dir(closed / "var"))


def test_somebody_elses_socket_directory_is_refused(var_dir: Path):
    sockets = places.socket_dir(var_dir)
    sockets.parent.mkdir(exist_ok=True)
    sockets.symlink_to(var_dir)
    try:
        with pytest.raises(embedded.EmbeddedServerError, match="somebody else"):
            embedded.prepare_valkey(var_dir)
    finally:
        sockets.unlink()


def test_a_server_that_does_not_start_is_said(var_dir: Path):
    server = embedded.prepare_valkey(var_dir)
    appended = var_dir / "valkey" / "appendonlydir"
    appended.write_text("not a directory")
    with pytest.raises(embedded.EmbeddedServerError, match="valkey did not start"):
        embedded.start(server)


def test_stopping_is_clean(var_dir: Path):
    server = embedded.prepare_postgres(var_dir, durable=False)
    process = embedded.start(server)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert not list(places.postgres_socket_dir(var_dir).glob(".s.PGSQL.*"))
