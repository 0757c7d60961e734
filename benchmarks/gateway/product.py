"""Our side of the comparison: real servers, a real gateway, Celery and beat; and the worker's double."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
import redis

from engine_worker.broker import keys
from weir import embedded
from weir.process import Command
from weir.servers import server_arguments

ROOT = Path(__file__).resolve().parents[2]
MODEL = "bench"
HELD = "bench-held"
"""The same, of a double that takes its time."""
HELD_STEP_S = 1.0
_READY_S = 120.0


@dataclass
class Product:
    scratch: Path
    env: dict[str, str]
    key: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.scratch / "product.log"

    def start(self, name: str, *arguments: str) -> None:
        with self.log.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=self.env, stdout=log, stderr=log
            )

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def start_gateway(self, server: str) -> int:
        """Its port, when it answers."""
        port = free_port()
        self.start("gateway", *server_arguments(server, host="127.0.0.1", port=port))
        # With the key, so that it is known then.
        self.until(lambda: answers(port, "/v1/quota", key=self.key, status=200), f"{server} to answer")
        return port

    def start_floor(self) -> int:
        port = free_port()
        self.start("floor", "-m", "benchmarks.gateway.floor", str(port))
        self.until(lambda: answers(port), "the floor to answer")
        return port

    def start_probed(self) -> int:
        """The gateway, and the port at which it tells how long its loop was held (`GET /probe`)."""
        port = free_port()
        self.start("gateway", "-m", "benchmarks.gateway.probed", str(port))
        self.until(lambda: answers(port, "/v1/quota", key=self.key, status=200), "the gateway to answer")
        return port

    def start_double(self, name: str, model_dir: Path, step_s: float, dimensions: int = 0) -> None:
        double = ("-m", "benchmarks.gateway.double", name, str(model_dir), str(step_s), str(dimensions))
        self.start(name, *double)
        with redis.Redis.from_url(self.env["REDIS_URL"]) as server:
            card = keys.model_prefix(name) + "card"
            self.until(lambda: server.exists(card) == 1, f"the double of {name}")

    def until(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not is_true():
            if time.monotonic() > deadline:
                sys.exit(f"waited {_READY_S:g} s for {what}:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def memory_mb(self, name: str) -> float:
        return float(psutil.Process(self.processes[name].pid).memory_info().rss) / 1e6

    def cpu_s(self, name: str) -> float:
        """Of the process and all that it started, what has ended included."""
        process = psutil.Process(self.processes[name].pid)
        times = []
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a backend whose client has just left
                times.append(one.cpu_times())
        return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))

    def cpu_s_of_all(self) -> dict[str, float]:
        return {name: self.cpu_s(name) for name in self.processes}

    def ledger_rows(self) -> int:
        with psycopg.connect(self.env["DATABASE_URL"]) as database:
            row = database.execute("SELECT count(*) FROM inference_usagerecord").fetchone()
        assert row is not None
        return int(row[0])


@contextlib.contextmanager
def running_product(scratch: Path, model_dir: Path, port: int) -> Iterator[Product]:
    """Everything but the gateway, with an instant worker and a migrated database. The key has limits that it never
    reaches, so that they are all reckoned."""
    var = scratch / "var"
    base_url = f"http://localhost:{port}"
    product = Product(scratch, {})
    try:
        servers = [embedded.prepare_postgres(var), embedded.prepare_valkey(var)]
        for server in servers:
            product.processes[server.command.name] = _started(server.command)
        for server in servers:
            product.until(server.is_ready, server.command.name)
        os.environ |= {
            "WEIR_VAR_DIR": str(var),
            "DATABASE_URL": servers[0].url,
            "REDIS_URL": servers[1].url,
            "WEIR_BASE_URL": base_url,
            "DJANGO_SETTINGS_MODULE": "weir.settings",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        }
        product.env = dict(os.environ)
        product.key = _prepare(var, base_url)
        product.start_double(MODEL, model_dir, 0.0)
        celery = ("-W", "ignore", "-m", "celery", "-q", "-A", "weir.celery")
        product.start("celery", *celery, "worker", "--loglevel", "WARNING", "--concurrency", "1")
        product.start(
            "beat",
            *celery,
            "beat",
            "--loglevel",
            "WARNING",
            "--schedule",
            str(var / "schedule"),
            "--pidfile",
            "",
        )
        yield product
    finally:
        for name in reversed(list(product.processes)):
            if name == "postgres":
                product.processes[name].send_signal(signal.SIGINT)
            product.stop(name)


def _started(command: Command) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.wrapped(), env=command.environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _prepare(var: Path, base_url: str) -> str:
    import django

    django.setup()
    from tenants.models import Tenant
    from tenants.principal import LimitMetric
    from tenants.services import Actor, set_quota_limit
    from tenants.services.demo import DEMO_SLUG
    from weir import demo

    login = demo.prepare_database(var, base_url)
    assert isinstance(login, demo.Login)
    login.publish()
    tenant = Tenant.objects.get(slug=DEMO_SLUG)
    tenant.tier.__class__.objects.update(max_queued=100_000, max_queued_per_tenant=100_000)
    for metric, amount in (
        (LimitMetric.REQUESTS, 10_000_000),
        (LimitMetric.TOKENS, 1_000_000_000),
        (LimitMetric.CONCURRENCY, 10_000),
    ):
        set_quota_limit(actor=Actor.system("bench"), owner=tenant, metric=metric, amount=amount)
    lines = (var / "demo.env").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("WEIR_API_KEY="))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int, path: str = "/v1/models", *, key: str = "none", status: int | None = None) -> bool:
    """With that status; with any, where none is given."""
    head = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    )
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.settimeout(10)
            connection.sendall(head.encode())
            return connection.recv(12).startswith(f"HTTP/1.1 {status or ''}".encode())
    except OSError:
        return False
