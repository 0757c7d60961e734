"""Probes and the doctor against real faults, each by stopping or misnaming a real server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
import redis
from django.db import connection
from psycopg.sql import SQL, Identifier, Literal

from engine_worker.broker import WorkerBroker
from engine_worker.protocol import StartStage, WorkerStarting
from inference.health import said_of_workers
from tests.e2e.site import MODEL, ROOT, Site, running_site
from tests.engine_worker.broker.driving import card, status
from tests.engine_worker.models import make_tiny_model
from tests.factories import make_key, make_tenant
from weir import embedded
from weir.doctor import Finding, machine, servers, serving

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


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], "none is alive"),
        ([(StartStage.LOADING, 3)], "one is starting: it loads its model, for 3 s so far"),
        (
            [(StartStage.LOADING, 90), (StartStage.COMPILING, 20.4)],
            "one is starting: it compiles its kernels, once per machine, which takes a minute or two; "
            "it has been at it for 20 s",
        ),
    ],
)
def test_while_a_worker_starts_it_is_told_what_that_is_at(stages: list[tuple[str, float]], said: str):
    starting = [
        WorkerStarting(worker_id="w", model="secret-model", stage=stage, for_s=for_s)
        for stage, for_s in stages
    ]
    assert said_of_workers([], starting) == said


@contextmanager
def starting_worker(site: Site, model: Path, cache: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The shipped one in place of the site's, on a machine that has no kernels yet."""
    site.stop_worker()
    with site.log.open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "engine_worker", "--model", f"secret-model={model}", "--threads", "1"],
            cwd=ROOT, env=site.env | {"XDG_CACHE_HOME": str(cache), "WEIR_KERNELS": "compiled"}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait(10)
        site.serve()


@pytest.mark.timeout(240)
def test_of_a_real_worker_that_starts_probes_hear_what_it_is_at(site: Site, tmp_path: Path):
    model = make_tiny_model(tmp_path / "tiny")
    with starting_worker(site, model, tmp_path / "cache") as worker:
        said: list[str] = []
        deadline = time.monotonic() + 120
        while not any("it compiles its kernels" in each for each in said) and time.monotonic() < deadline:
            assert worker.poll() is None, site.log.read_text()[-2000:]
            said.append(readiness(site, wanted=503)["workers"])
            time.sleep(0.2)
        assert re.fullmatch(
            r"one is starting: it compiles its kernels, once per machine, which takes a minute or two; "
            r"it has been at it for \d+ s",
            said[-1],
        )
        assert not any("secret-model" in each for each in said)
        worker.kill()
        worker.wait(10)
        deadline = time.monotonic() + 60
        while (left := readiness(site, wanted=503)["workers"]) != "none is alive":
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
    assert readiness(site, wanted=200)["workers"] == "ok"


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
        assert httpx.get(f"{site.url}/readyz", timeout=10).headers["retry-after"] == "5"
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


@contextmanager
def role_with_password(name: str, password: str) -> Iterator[None]:
    """A role of the tests' PostgreSQL that, other than all the rest, is asked for its password."""
    with psycopg.connect(**connection.get_connection_params(), autocommit=True) as admin:
        (place,) = admin.execute("SHOW hba_file").fetchone() or ("",)
        rules = Path(place)
        before = rules.read_text()
        admin.execute(SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(Identifier(name), Literal(password)))
        try:
            rules.write_text(f"local all {name} scram-sha-256\nhost all {name} all scram-sha-256\n{before}")
            admin.execute("SELECT pg_reload_conf()")
            yield
        finally:
            rules.write_text(before)
            admin.execute("SELECT pg_reload_conf()")
            admin.execute(SQL("DROP ROLE {}").format(Identifier(name)))


def database_url(site: Site, *, user: str = "", name: str = "") -> str:
    url = urlsplit(site.env["DATABASE_URL"])
    place = url.netloc.rpartition("@")[2]
    return url._replace(
        netloc=f"{user}@{place}" if user else url.netloc, path=f"/{name}" if name else url.path
    ).geturl()


def until_refused(url: str) -> None:
    """PostgreSQL reads its rules anew a moment after it was told to."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return
        time.sleep(0.05)
    raise TimeoutError("the rules are not in force")


def test_the_doctor_tells_wrong_passwords_from_servers_that_are_away(site: Site, valkey: Any):
    wrong = database_url(site, user="probed:mistyped")
    with role_with_password("probed", "right"), redis.Redis.from_url(valkey[0]) as server:
        server.acl_setuser("probed", enabled=True, passwords="+right", keys="*", commands=["+@all"])
        until_refused(wrong)
        status, found = doctor(
            site,
            DATABASE_URL=wrong,
            REDIS_URL=valkey[0].replace("unix://", "unix://probed:mistyped@"),
            WEIR_MODEL="/no/such/model",
        )
        server.acl_deluser("probed")
    assert status == 1
    assert "ERROR    database: refuses us: " in found
    assert "-> Correct the user or the password in DATABASE_URL." in found
    assert "ERROR    redis: refuses us: " in found
    assert "-> Correct the user or the password in REDIS_URL." in found
    assert "ERROR    model: WEIR_MODEL names /no/such/model, which is not there" in found
    assert "mistyped" not in found


def test_the_doctor_sees_a_database_without_our_tables(site: Site):
    with psycopg.connect(**connection.get_connection_params(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE unmigrated")
        try:
            status, found = doctor(site, DATABASE_URL=database_url(site, name="unmigrated"))
        finally:
            admin.execute("DROP DATABASE unmigrated WITH (FORCE)")
    assert status == 1
    assert "ERROR    database: not migrated: " in found
    assert "-> python manage.py migrate" in found
    missing = doctor(site, DATABASE_URL=database_url(site, name="unmigrated"))[1]
    assert 'database "unmigrated" does not exist' in missing
    assert "-> Make the database and its role, or correct their names in DATABASE_URL." in missing


@pytest.mark.django_db(transaction=True)
def test_the_doctor_knows_another_pepper_by_a_key(site: Site):
    key = make_key(make_tenant()).secret
    assert "OK       keys: the pepper is the one" in doctor(site, WEIR_API_KEY=key)[1]
    status, found = doctor(site, WEIR_API_KEY=key, WEIR_API_KEY_PEPPER="another one")
    assert status == 1
    assert "ERROR    keys: the key in WEIR_API_KEY was made under another pepper" in found
    assert "restore var/secrets/api_key_pepper from a backup" in found
    assert key not in found


def test_a_pepper_that_is_younger_than_keys_is_suspicious(db: None, settings: Any, tmp_path: Path):
    settings.VAR_DIR, settings.SECRETS_ARE_GENERATED = tmp_path, True
    (tmp_path / "secrets").mkdir()
    pepper = tmp_path / "secrets" / "api_key_pepper"
    pepper.write_text("x")
    os.utime(pepper, (0, 0))
    make_key(make_tenant())
    assert list(machine.pepper()) == []
    os.utime(pepper, (time.time() + 60, time.time() + 60))
    (found,) = machine.pepper()
    assert found.level == "warning"
    assert "1 API keys are older than" in found.text


def test_clocks_that_disagree_are_told(site: Site, valkey: Any, settings: Any):
    settings.REDIS_URL = valkey[0]
    assert list(servers.redis_clock()) == list(servers.database_clock()) == []
    (behind,) = servers.redis_clock(lambda: time.time() + 60)
    assert behind.text == "Redis's clock is 60 s behind this machine's"
    (ahead,) = servers.database_clock(lambda: time.time() - 60)
    assert ahead.text == "PostgreSQL's clock is 60 s ahead of this machine's"

    async def beat(model: str) -> None:
        worker = WorkerBroker(valkey[0], model=model, worker_id="late", timeout_s=5)
        await worker.register(card(model), b"{}")
        late = status(worker, updated_at_ms=int(time.time() * 1000) - 90_000)
        await worker.heartbeat(late, tokenizer_sha256=card(model).tokenizer_sha256)
        assert any("the clock of worker late is 90 s behind" in found.text for found in await look())
        await worker.farewell()
        await worker.aclose()

    async def look() -> list[Finding]:
        return await asyncio.to_thread(lambda: list(serving.engine()))

    asyncio.run(beat("of-late"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a file system that is always full")
def test_the_doctor_sees_a_full_disk_of_the_models(settings: Any, tmp_path: Path):
    settings.VAR_DIR = tmp_path
    before = list(machine.disk())
    (tmp_path / "models").symlink_to("/proc")
    (found,) = [finding for finding in machine.disk() if finding not in before]
    assert (found.level, found.part, found.text) == (
        "error",
        "disk",
        f"0 MiB left under {tmp_path / 'models'}",
    )
