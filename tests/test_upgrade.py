"""The upgrade drill: a newer worker and gateway come beside the old ones under load, the old ones go; nobody notices.

"Newer" speaks our protocol with fields that the old one does not know, on everything it sends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from django.conf import settings
from django.db import connection

from engine_worker.broker import keys
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tests.e2e.site import MODEL, ROOT, Site, running_site, wait_until
from tests.factories import make_key, make_tenant

TOKENS = 80
"""At forty a second: longer than a step of the upgrade takes."""
CLIENTS = 4
NEWER = """
import msgspec
from engine_worker import protocol

_encode = protocol.encode

def encode(message):
    fields = msgspec.msgpack.decode(_encode(message))
    return msgspec.msgpack.encode({**fields, "of_the_next_version": ["what", 1, "knows"]})

protocol.encode = encode
"""


class Load:
    """Clients that stream one answer after the other, at whatever gateway is up when they begin."""

    def __init__(self, key: str, gateway: str) -> None:
        self.gateway = gateway
        self.answers: list[tuple[str, str]] = []
        self.errors: list[str] = []
        self._key = key
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        body = {
            "model": MODEL,
            "stream": True,
            "max_tokens": TOKENS,
            "seed": 7,
            "messages": [{"role": "user", "content": f"client {number}"}],
        }
        while not self._stop.is_set():
            try:
                self._ask(number, body)
            except httpx.HTTPError as error:
                self.errors.append(repr(error))

    def _ask(self, number: int, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        url = f"{self.gateway}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=100) as answer:
            if answer.status_code != 200:
                self.errors.append(f"{answer.status_code} {answer.read().decode()}")
                return
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        if lines[-1] != "data: [DONE]" or any('"error"' in line for line in lines):
            self.errors.append(lines[-1])
        else:
            events = [json.loads(line[6:]) for line in lines[:-1]]
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            self.answers.append((f"client {number}", text))


@pytest.fixture
def site(transactional_db: None, tmp_path: Path) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_METRICS_TOKEN", "drain-needs-it")
        with running_site(connection.settings_dict, tmp_path) as site:
            yield site


def workers() -> set[str]:
    with redis.Redis.from_url(settings.REDIS_URL) as server:
        return {worker.decode() for worker in server.zrange(keys.model_prefix(MODEL) + "workers", 0, -1)}


@pytest.mark.timeout(400)
def test_an_upgrade_without_an_error(site: Site, tmp_path: Path):
    tenant = make_tenant()
    load = Load(make_key(tenant).secret, site.url)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text(NEWER)
    newer_env = site.env | {"PYTHONPATH": f"{newer}:{site.env['PYTHONPATH']}"}
    started: list[subprocess.Popen[bytes]] = []

    def start(env: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
        with site.log.open("ab") as log:
            started.append(
                subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stdout=log, stderr=log)
            )
        return started[-1]

    try:
        wait_until(lambda: len(load.answers) >= CLIENTS, "answers of the old version", site.log, 120)
        before = workers()
        (old_worker,) = (
            process
            for process in psutil.Process(os.getpid()).children()
            if "tests.engine_worker.scripted_worker" in " ".join(process.cmdline())
            and MODEL in process.cmdline()
            and process.environ().get("WEIR_PORT") == str(site.port)
        )

        # Workers first: each understands what older gateways send.
        start(newer_env, "-m", "tests.engine_worker.scripted_worker", MODEL, str(tmp_path))
        wait_until(lambda: bool(workers() - before), "the new worker", site.log, 120)
        old_worker.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        old_worker.send_signal(
            signal.SIGTERM
        )  # hands back what it has at once: the new one goes on in mid-answer
        done = len(load.answers)
        wait_until(lambda: len(load.answers) >= done + CLIENTS, "answers of the new worker", site.log, 120)

        # Then the gateways, one after the other.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start(
            newer_env, "-m", "daphne", "-v", "0", "-b", "127.0.0.1", "-p", str(port), "weir.asgi:application"
        )
        new_url = f"http://localhost:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{new_url}/readyz", timeout=10).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "the new gateway", site.log, 120)
        load.gateway = new_url
        drain = [sys.executable, "manage.py", "drain", "--url", site.url, "--settle", "1", "--timeout", "120"]
        subprocess.run(drain, cwd=ROOT, env=site.env, check=True, timeout=150)
        site.kill_gateway()
        done = len(load.answers)
        wait_until(lambda: len(load.answers) >= done + CLIENTS, "answers of the new gateway", site.log, 120)
    finally:
        load.stop()
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
    assert load.errors == []
    texts = {client: {text for who, text in load.answers if who == client} for client, _ in load.answers}
    assert all(len(found) == 1 for found in texts.values()), "the same answer before, during and after"
    assert all(len(next(iter(found))) == TOKENS for found in texts.values())

    def rows() -> int:
        drain_usage_stream()
        return UsageRecord.objects.filter(tenant=tenant).count()

    wait_until(lambda: rows() >= len(load.answers), "the ledger", site.log, 60)
    assert rows() == len(load.answers)
    resumed = UsageRecord.objects.filter(tenant=tenant, completion_tokens=TOKENS, finish_reason="length")
    assert resumed.count() == len(load.answers)
