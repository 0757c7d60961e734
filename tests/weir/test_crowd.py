"""A crowd that comes while a gateway's loop is held, by a garbage collection say: everybody is connected."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.e2e.site import ROOT
from tests.weir.talkative_server import APPLICATION
from weir.servers import DAPHNE, UVICORN

CROWD = 300


@contextmanager
def serving(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    argv = [sys.executable, "-m", *(word.replace("PORT", str(port)) for word in command)]
    server = subprocess.Popen(argv, cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/state", timeout=30).raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield server, port
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(30)


def connected(port: int, stack: ExitStack, *, within_s: float) -> list[socket.socket]:
    """Of a crowd, who is connected before the first that is not within that time."""
    there = []
    for _ in range(CROWD):
        client = stack.enter_context(socket.socket())
        client.settimeout(within_s)
        try:
            client.connect(("127.0.0.1", port))
        except TimeoutError:
            break
        there.append(client)
    return there


@pytest.mark.parametrize("server", [DAPHNE, UVICORN])
def test_a_crowd_is_connected_while_nobody_accepts(server: str):
    with serving("tests.weir.talkative_server", server, "PORT") as (process, port), ExitStack() as stack:
        process.send_signal(signal.SIGSTOP)
        crowd = connected(port, stack, within_s=30)
        assert len(crowd) == CROWD
        process.send_signal(signal.SIGCONT)
        for client in crowd:
            client.settimeout(60)
            client.sendall(b"GET /state HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert all(client.recv(64).startswith(b"HTTP/1.1 200") for client in crowd)


def test_control_a_bare_daphne_leaves_most_of_them_outside():
    command = ("daphne", "-v", "0", "-b", "127.0.0.1", "-p", "PORT", APPLICATION)
    with serving(*command) as (process, port), ExitStack() as stack:
        process.send_signal(signal.SIGSTOP)
        assert len(connected(port, stack, within_s=0.5)) < CROWD / 2
