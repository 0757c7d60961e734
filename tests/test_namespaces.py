"""Two gateways and two workers on machines of their own, as network namespaces: links are cut and heal, streams go on.

client, Redis: the hub, 10.213.7.1          each machine: its own namespace on the hub's bridge
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings
from django.db import connection

from engine_worker.broker import keys
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tests.e2e.site import ROOT, scripted_model, wait_until
from tests.factories import make_key, make_tenant
from tests.inference.api.test_resume import events, text_of
from weir import embedded

MODEL = "namespaced"
HUB = "10.213.7.1"
MACHINES = {
    "gateway1": "10.213.7.11",
    "gateway2": "10.213.7.12",
    "worker1": "10.213.7.21",
    "worker2": "10.213.7.22",
}
TOKENS = 120
"""At forty a second: there is time to cut links in the middle."""
IP = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")


def ip(*arguments: str) -> None:
    assert IP
    subprocess.run([IP, *arguments], check=True, capture_output=True, timeout=20)


def can_make_namespaces() -> bool:
    if IP is None or os.geteuid() != 0:
        return False
    name = f"weir-probe-{uuid.uuid4().hex[:6]}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "bridge0", "type", "bridge")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run([IP, "netns", "del", name], check=False, capture_output=True, timeout=20)
    return True


pytestmark = [
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip netns and bridges"),
    pytest.mark.timeout(500),
]


class Network:
    """A hub with a bridge, and a machine per name: all in namespaces that end with the test."""

    def __init__(self) -> None:
        self._tag = uuid.uuid4().hex[:6]
        self.hub = f"weir-{self._tag}-hub"
        self._made: list[str] = []

    def of(self, machine: str) -> str:
        return f"weir-{self._tag}-{machine}"

    def __enter__(self) -> Network:
        try:
            self._add(self.hub)
            ip("-n", self.hub, "link", "add", "bridge0", "type", "bridge")
            ip("-n", self.hub, "addr", "add", f"{HUB}/24", "dev", "bridge0")
            ip("-n", self.hub, "link", "set", "bridge0", "up")
            for machine, address in MACHINES.items():
                name = self.of(machine)
                self._add(name)
                ip(
                    "-n",
                    self.hub,
                    "link",
                    "add",
                    machine,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                )
                ip("-n", self.hub, "link", "set", machine, "master", "bridge0", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            subprocess.run([str(IP), "netns", "del", name], check=False, capture_output=True, timeout=20)

    def _add(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    def cut(self, machine: str) -> None:
        ip("-n", self.hub, "link", "set", machine, "down")

    def heal(self, machine: str) -> None:
        ip("-n", self.hub, "link", "set", machine, "up")

    def enter_hub(self) -> None:
        """This thread's sockets are the hub's from now on."""
        descriptor = os.open(f"/run/netns/{self.hub}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)


class Fleet:
    def __init__(self, network: Network, scratch: Path) -> None:
        self.network, self.log = network, scratch / "fleet.log"
        self.log.touch()
        self._processes: list[subprocess.Popen[bytes]] = []
        # A thread whose sockets live in the hub does all that a client does.
        self._clients = ThreadPoolExecutor(12, initializer=network.enter_hub)

    def run(self, machine: str, env: dict[str, str], *command: str) -> None:
        prefix = [str(IP), "netns", "exec", machine]
        with self.log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [*prefix, *command], cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log
                )
            )

    def client(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._clients.submit(work, *arguments)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: bool(self.client(condition).result(60)), what, self.log, 150)

    def stop(self) -> None:
        self._clients.shutdown(cancel_futures=True)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait(10)


@pytest.fixture
def fleet(transactional_db: None) -> Iterator[Fleet]:
    scratch = Path(tempfile.mkdtemp(prefix="weir-netns-"))
    scratch.chmod(0o755)
    with Network() as network:
        fleet = Fleet(network, scratch)
        try:
            server = embedded.prepare_valkey(scratch, durable=False)
            valkey = [*server.command.argv, "--port", "6379", "--bind", HUB, "--protected-mode", "no"]
            fleet.run(network.hub, {}, *valkey)
            (scratch / "model").mkdir()
            model = scripted_model(scratch / "model")
            database = connection.settings_dict
            common = {
                "REDIS_URL": f"redis://{HUB}:6379/0",
                # A unix socket, which no namespace parts: it is the links to Redis and clients that are cut here.
                "DATABASE_URL": f"{settings.DATABASE_URL.rpartition('/')[0]}/{database['NAME']}",
                "WEIR_ALLOWED_HOSTS": "*",
                "DJANGO_SETTINGS_MODULE": "weir.settings",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
                "SCRIPTED_STEP_S": "0.025",
                "SCRIPTED_LEASE_MS": "2000",
            }
            for machine, address in MACHINES.items():
                if machine.startswith("worker"):
                    command = ["-m", "tests.engine_worker.scripted_worker", MODEL, str(model)]
                else:
                    command = [
                        "-m",
                        "daphne",
                        "-v",
                        "0",
                        "-b",
                        address,
                        "-p",
                        "8000",
                        "weir.asgi:application",
                    ]
                fleet.run(network.of(machine), common, sys.executable, *command)
            yield fleet
        finally:
            fleet.stop()
            shutil.rmtree(scratch, ignore_errors=True)


def workers() -> int:
    client = redis.Redis(host=HUB, socket_timeout=5, socket_connect_timeout=5)
    with contextlib.closing(client), contextlib.suppress(redis.RedisError):
        return int(client.zcard(keys.model_prefix(MODEL) + "workers"))
    return 0


def is_ready(machine: str) -> bool:
    try:
        return httpx.get(f"http://{MACHINES[machine]}:8000/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


class Stream:
    """One answer, read at `gateway` until it breaks off, then on at another."""

    def __init__(self, key: str, gateway: str, number: int) -> None:
        self.parts: list[tuple[str, Any]] = []
        self._key, self._gateway, self._number = key, gateway, number

    def _client(self, gateway: str) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://{MACHINES[gateway]}:8000/v1/",
            headers={"Authorization": f"Bearer {self._key}", "x-weir-resume-grace": "120"},
            timeout=httpx.Timeout(90, read=8),
        )

    def read(self) -> bool:
        """Whether it came to its end."""
        body = {
            "model": MODEL, "stream": True, "max_tokens": TOKENS, "seed": 7,
            "messages": [{"role": "user", "content": f"stream {self._number}"}],
        }  # fmt: skip
        with (
            contextlib.suppress(httpx.TransportError),
            self._client(self._gateway) as client,
            client.stream("POST", "chat/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for part in events(answer):
                self.parts.append(part)
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        return bool(self.parts) and self.parts[-1][1] == "[DONE]"

    def resume(self, gateway: str) -> None:
        request_id = self.parts[0][1]["id"]
        last = next(event_id for event_id, _ in reversed(self.parts) if event_id)
        address = f"requests/{request_id}/stream"
        with (
            self._client(gateway) as client,
            client.stream("GET", address, headers={"Last-Event-ID": last}) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            self.parts.extend(events(answer))


def test_streams_outlive_cut_links(fleet: Fleet):
    network = fleet.network
    fleet.until(lambda: workers() == 2, "two workers")
    for gateway in ("gateway1", "gateway2"):
        fleet.until(lambda gateway=gateway: is_ready(gateway), gateway)
    tenant = make_tenant()
    key = make_key(tenant).secret
    streams = [Stream(key, f"gateway{1 + number % 2}", number) for number in range(6)]

    def all_under_way() -> bool:
        return all(len(stream.parts) > 10 or stream.is_whole for stream in streams)

    # A worker's link: its leases lapse, the other goes on where the log ends; no client notices more than a pause.
    reading = [fleet.client(stream.read) for stream in streams]
    wait_until(all_under_way, "streams", fleet.log, 60)
    network.cut("worker1")
    assert [future.result(120) for future in reading] == [True] * len(streams)
    network.heal("worker1")
    fleet.until(lambda: workers() == 2, "the worker that was cut off")
    first = {stream._number: text_of(stream.parts) for stream in streams}
    assert all(len(text) == TOKENS for text in first.values())

    # A gateway's link: its clients go on at the other one, from the last event that they have.
    streams = [Stream(key, "gateway1", number) for number in range(6)]
    reading = [fleet.client(stream.read) for stream in streams]
    wait_until(all_under_way, "streams", fleet.log, 60)
    network.cut("gateway1")
    assert [future.result(120) for future in reading] == [False] * len(streams)
    resuming = [fleet.client(stream.resume, "gateway2") for stream in streams]
    for future in resuming:
        future.result(120)
    assert {stream._number: text_of(stream.parts) for stream in streams} == first, (
        "the same text, whatever was cut"
    )
    network.heal("gateway1")
    fleet.until(lambda: is_ready("gateway1"), "the gateway that was cut off")
    after = Stream(key, "gateway1", 0)
    assert fleet.client(after.read).result(120)
    assert text_of(after.parts) == first[0]

    def rows() -> list[tuple[int, str]]:
        fleet.client(drain_usage_stream_of_hub).result(60)
        found = UsageRecord.objects.filter(tenant=tenant)
        return list(found.values_list("completion_tokens", "finish_reason"))

    wait_until(lambda: len(rows()) >= 13, "the ledger", fleet.log, 90)
    assert rows() == [(TOKENS, "length")] * 13


def drain_usage_stream_of_hub() -> None:
    drain_usage_stream(redis_url=f"redis://{HUB}:6379/0")
    connection.close()
