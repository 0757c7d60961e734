"""The whole product on a port of its own: the real gateway, a scripted worker, the tests' database."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from django.db import connections
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine_worker.broker import keys
from engine_worker.broker.connection import connect_sync, disconnect_sync
from tests.engine_worker.models import VOCAB_SIZE, byte_tokenizer
from weir.servers import DAPHNE, server_arguments

ROOT = Path(__file__).resolve().parents[2]
MODEL = "scripted-model"
LATE_MODEL = "late-model"
"""The gateways are told of it, and no worker ever brings it."""
TOKENS_PER_S = 40
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
TOOL_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool.function | tojson }}{{ '\n' }}{% endfor %}"
    "Answer with <tool_call>.\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant:"
)
"""The same, for tools."""
_T = TypeVar("_T")


@dataclass
class Site:
    port: int
    env: dict[str, str]
    log: Path
    server: str = DAPHNE
    _gateway: subprocess.Popen[bytes] | None = None
    _worker: subprocess.Popen[bytes] | None = None
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def start_gateway(self) -> None:
        with self.log.open("ab") as log:
            self._gateway = subprocess.Popen(
                [sys.executable, *server_arguments(self.server, host="127.0.0.1", port=self.port)],
                cwd=ROOT, env=self.env, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._answers, "the gateway to answer", self.log)

    def kill_gateway(self) -> None:
        """As a crash would: every connection is cut."""
        if self._gateway:
            self._gateway.kill()
            self._gateway.wait()

    def serve(self) -> None:
        """Its worker is the only one for its model: all sites of a process share a Valkey, and the worker of
        another would take this one's requests. Those that a session keeps wait while another serves."""
        global _serving
        if _serving is self:
            return
        if _serving is not None:
            _serving.stop_worker()
        _serving = self
        self.start_worker()
        if self._gateway:
            self.wait_for_worker()

    def crash_worker(self) -> None:
        """As a lost machine would: its leases lapse, and nobody says so."""
        if self._worker:
            self._worker.kill()
            self._worker.wait()

    def start_worker(self) -> None:
        with self.log.open("ab") as log:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "tests.engine_worker.scripted_worker", MODEL, self.log.parent],
                cwd=ROOT, env=self.env, stdout=log, stderr=log,
            )  # fmt: skip

    def wait_for_worker(self) -> None:
        def is_there() -> bool:
            return MODEL in httpx.get(f"{self.url}/docs/", timeout=10).text

        retry = Retry(NoBackoff(), 0)
        server = connect_sync(self.env["REDIS_URL"], connect_timeout_s=5, timeout_s=10, retry=retry)
        try:
            workers = keys.model_prefix(MODEL) + "workers"
            wait_until(lambda: server.zcard(workers) == 1, "the worker to be the only one", self.log)
        finally:
            disconnect_sync(server)
        wait_until(is_there, "the worker", self.log)

    def stop_worker(self) -> None:
        global _serving
        if _serving is self:
            _serving = None
        if self._worker:
            self._worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._worker.wait(10)
            self._worker.terminate()  # if it still makes what a test left behind, it hands that back at once
            self._worker.wait(10)
            self._worker = None

    def do(self, work: Callable[[], _T]) -> _T:
        """Runs database work beside the browser, whose event loop Django would take for an async caller."""

        def closing() -> _T:
            try:
                return work()
            finally:
                connections.close_all()

        return self._threads.submit(closing).result()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/login/", timeout=10).status_code == 200
        return False


_serving: Site | None = None
"""Whose worker runs."""


def wait_until(condition: Callable[[], bool], what: str, log: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def scripted_model(directory: Path) -> Path:
    """What the gateway needs to know of a model: a tokenizer of bytes and a chat template."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["Scripted"], "vocab_size": VOCAB_SIZE, "eos_token_id": 256})
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory


@contextlib.contextmanager
def running_site(
    database: dict[str, Any],
    scratch: Path,
    *,
    migrate: bool = False,
    more_env: Mapping[str, str] | None = None,
) -> Iterator[Site]:
    """On that database, which is migrated already unless asked for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = quote(database["HOST"], safe="")
    secret = f":{quote(database['PASSWORD'], safe='')}" if database["PASSWORD"] else ""
    place = f"{host}:{database['PORT']}" if database["PORT"] else host
    env = {
        **os.environ,
        "DATABASE_URL": f"postgres://{database['USER']}{secret}@{place}/{database['NAME']}",
        "WEIR_PORT": str(port),
        "WEIR_BASE_URL": f"http://localhost:{port}",
        "DJANGO_SETTINGS_MODULE": "weir.settings",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        "WEIR_EXPECTED_MODELS": LATE_MODEL,
        "SCRIPTED_STEP_S": str(1 / TOKENS_PER_S),
        **(more_env or {}),
    }
    site = Site(port=port, env=env, log=scratch / "site.log")
    scripted_model(scratch)
    if migrate:
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity=0"],
            cwd=ROOT, env=env, check=True, timeout=300,
        )  # fmt: skip
    try:
        site.serve()
        site.start_gateway()
        site.wait_for_worker()
        yield site
    finally:
        site.kill_gateway()
        site.stop_worker()
