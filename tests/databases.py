"""Databases of their own on the tests' server, and manage.py as an operator runs it on one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from django.conf import settings

from tests.e2e.site import ROOT

NO_REDIS = "redis://127.0.0.1:9/0"


def url_of(database: str) -> str:
    return f"{settings.DATABASE_URL.rpartition('/')[0]}/{database}"


@contextmanager
def a_database() -> Iterator[str]:
    """The name of an empty one, which is dropped in the end."""
    name = f"apart_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(settings.DATABASE_URL, autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}"')
        yield name
        server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def paused_postgres() -> Iterator[None]:
    """Every process of the server stands still: connections hang, nothing is refused."""
    servers = [child for child in psutil.Process().children() if child.name() == "postgres"]
    if not servers:
        pytest.skip("DATABASE_URL names a server that is not ours to pause")
    (postmaster,) = servers
    processes = [postmaster, *postmaster.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(processes):
            process.resume()


def manage(
    *arguments: str, database: str, var_dir: Path, redis_url: str = NO_REDIS
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=kept | {"DATABASE_URL": url_of(database), "REDIS_URL": redis_url, "WEIR_VAR_DIR": str(var_dir)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
