"""Probes and the doctor against real faults, each by stopping or misnaming a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import connection

from tests.e2e.site import MODEL, ROOT, Site, running_site
from weir import doctor as examination
from weir import embedded

pytestmark = pytest.mark.django_db  # has the database made: the site uses it


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis for these tests alone: they stop it."""
    home = tmp_path_factory.mktemp("health")
    home.chmod(0o755)
    server = embedded.prepare_valkey(home, durable=True)
    process = embedded.start(server)
    yield server.url, process
    process.send_signal(signal.SIGCONT)
    process.send_signal(server.command.stop_signal)
    process.wait(15)


@pytest.fixture(scope="module")
def site(
    valkey: Any, django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    old = os.environ["REDIS_URL"]
    os.environ["REDIS_URL"] = valkey[0]
    try:
        with running_site(connection.settings_dict, tmp_path_factory.mktemp("health-site")) as site:
            yield site
    finally:
        os.environ["REDIS_URL"] = old


def readiness(site: Site, *, wanted: int, within_s: float = 20) -> dict[str, str]:
    deadline = time.monotonic() + within_s
    while True:
        answer = httpx.get(f"{site.url}/readyz", timeout=10)
        if answer.status_code == wanted or time.monotonic() > deadline:
            assert answer.status_code == wanted, answer.text
            checks: dict[str, str] = answer.json()["checks"]
            return checks
        time.sleep(0.2)


def doctor(site: Site, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "manage.py", "doctor"],
        cwd=ROOT, env=site.env | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_probe_needs_no_host_name_and_no_session(site: Site):
    for path in ("/healthz", "/readyz"):
        answer = httpx.get(site.url + path, headers={"Host": "10.1.2.3:8000"}, timeout=10)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        assert "set-cookie" not in answer.headers
    assert readiness(site, wanted=200) == {"database": "ok", "redis": "ok", "workers": "ok"}


def test_many_probes_are_one_check(site: Site):
    started = time.monotonic()
    with httpx.Client(timeout=10) as client:
        for _ in range(100):
            assert client.get(f"{site.url}/readyz").status_code == 200
    assert time.monotonic() - started < 10


def test_redis_that_hangs_makes_it_not_ready_but_alive(site: Site, valkey: Any):
    valkey[1].send_signal(signal.SIGSTOP)
    try:
        checks = readiness(site, wanted=503)
        assert checks == {"database": "ok", "redis": "can't be reached", "workers": "unknown"}
        assert httpx.get(f"{site.url}/healthz", timeout=2).status_code == 200
        status, found = doctor(site)
        assert status == 1
        assert "ERROR    redis: does not answer" in found
        assert "correct REDIS_URL" in found
    finally:
        valkey[1].send_signal(signal.SIGCONT)
    readiness(site, wanted=200)


def test_the_doctor_names_each_wrong_address(site: Site):
    status, found = doctor(
        site,
        DATABASE_URL="postgres://weir:hunter2hunter2@127.0.0.1:9/weir",
        REDIS_URL="redis://127.0.0.1:9/0",
        WEIR_BASE_URL="http://127.0.0.1:9",
    )
    assert status == 1
    for part in ("database", "redis", "gateway"):
        assert f"ERROR    {part}: " in found
    assert "hunter2" not in found
    status, found = doctor(site, REDIS_URL="http://nonsense")
    assert status == 1
    assert "REDIS_URL should be" in found


def test_the_doctor_on_a_site_that_serves_but_has_no_celery(site: Site):
    status, found = doctor(site)
    assert f"OK       engine: serves {MODEL}" in found
    assert "OK       database: migrated" in found, found
    assert f"OK       gateway: {site.url} answers" in found
    assert "ERROR    celery: no worker answers" in found
    assert status == 1


def test_it_is_well_with_everything_running(site: Site, tmp_path: Path):
    log = (tmp_path / "celery.log").open("wb")
    celery = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "weir.celery", "worker", "--pool", "solo"],
        cwd=ROOT, env=site.env, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 45
        while (found := doctor(site))[0] and time.monotonic() < deadline:
            time.sleep(0.5)
        assert found[0] == 0, found[1]
    finally:
        celery.terminate()
        celery.wait(30)
        log.close()


def test_no_worker_left(site: Site, tmp_path: Path):
    home = tmp_path / "other"
    home.mkdir(mode=0o755)
    empty = embedded.prepare_valkey(home, durable=False)
    process = embedded.start(empty)
    try:
        status, found = doctor(site, REDIS_URL=empty.url)
        assert status == 1
        assert "ERROR    engine: no worker serves a model" in found
        assert "keeps nothing on disk" in found
    finally:
        process.send_signal(empty.command.stop_signal)
        process.wait(15)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a file system that is always full")
def test_the_doctor_sees_a_full_disk_of_the_models(settings: Any, tmp_path: Path):
    settings.VAR_DIR = tmp_path
    before = list(examination._disk())
    (tmp_path / "models").symlink_to("/proc")
    (found,) = [finding for finding in examination._disk() if finding not in before]
    assert (found.level, found.part, found.text) == (
        "error",
        "disk",
        f"0 MiB left under {tmp_path / 'models'}",
    )
