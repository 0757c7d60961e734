"""Socket directories under /tmp go with the last process that uses them, and at the latest with the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.e2e.site import ROOT
from weir import embedded, places

_HOLD = "import sys; from pathlib import Path; from weir import embedded; embedded.prepare_valkey(Path(sys.argv[1])); "
DEEP = "/".join(["a-rather-long-name-for-a-directory"] * 4)
"""Sockets don't fit under it: their directory is under /tmp whoever runs the tests."""


@pytest.fixture
def var_dir(tmp_path: Path) -> Path:
    return tmp_path / DEEP


@contextmanager
def holder(var_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has prepared a server and ends when it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD + "print('held', flush=True); input()", var_dir],
        cwd=ROOT / "platform", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def age(var_dir: Path) -> Path:
    """The directory as if it had been made an hour ago."""
    directory = places.socket_dir(var_dir)
    hour_ago = directory.stat().st_mtime - 3600
    os.utime(directory, (hour_ago, hour_ago))
    return directory


def test_a_clean_end_removes_it(var_dir: Path):
    with holder(var_dir) as process:
        assert places.socket_dir(var_dir).is_dir()
        process.communicate("\n", timeout=30)
    assert not places.socket_dir(var_dir).exists()


def test_of_two_that_use_it_the_last_removes_it(var_dir: Path):
    with holder(var_dir) as first, holder(var_dir) as second:
        first.communicate("\n", timeout=30)
        assert places.socket_dir(var_dir).is_dir()
        second.communicate("\n", timeout=30)
    assert not places.socket_dir(var_dir).exists()


def test_what_a_crash_left_goes_with_the_next_start_of_any_other(var_dir: Path, tmp_path: Path):
    with holder(var_dir) as process:
        process.kill()
        process.wait(10)
    left = age(var_dir)
    young = tmp_path / "young" / DEEP
    with holder(young) as process:
        process.kill()
    with holder(tmp_path / "alive" / DEEP):
        alive = age(tmp_path / "alive" / DEEP)
        embedded.prepare_valkey(tmp_path / "next" / DEEP)
        assert not left.exists()
        assert alive.is_dir(), "a living process holds it"
        assert places.socket_dir(young).is_dir(), "it may be of an earlier release, that is starting"
    places.socket_dir(young).rmdir()


def test_of_a_server_that_a_crash_left_running_it_stays(var_dir: Path, tmp_path: Path):
    """macOS ends no children with their parent: the next start there has to find them."""
    server = embedded.prepare_valkey(tmp_path / "v")
    running = embedded.start(server)
    try:
        with holder(var_dir) as process:
            process.kill()
        directory = places.socket_dir(var_dir)
        (directory / "valkey.sock").symlink_to(places.valkey_socket(tmp_path / "v"))
        age(var_dir)
        embedded.prepare_valkey(tmp_path / "next" / DEEP)
        with redis.Redis(unix_socket_path=str(directory / "valkey.sock")) as client:
            assert client.ping()
    finally:
        running.terminate()
        running.wait(10)
    age(var_dir)
    embedded.prepare_valkey(tmp_path / "next" / DEEP)
    assert not directory.exists()
