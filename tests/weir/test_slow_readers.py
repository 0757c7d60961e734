"""FAULTS 77: who does not read is cut off, at a bounded cost in memory, and nobody else waits for it; nor for who does
not come to the end of a request, where no proxy is in front."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.site import ROOT
from tests.weir.talkative_app import PIECE, PIECES
from weir.servers import DAPHNE, UVICORN

WHOLE = len(PIECE) * PIECES


@pytest.fixture(scope="module", params=[DAPHNE, UVICORN])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    command = [sys.executable, "-m", "tests.weir.talkative_server", request.param, str(number)]
    server = subprocess.Popen(command, cwd=ROOT, env=env)
    try:
        until(lambda: answers(number))
        yield number
    finally:
        server.terminate()
        server.wait(30)


def until(condition: Any, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/state", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def state(port: int) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/state", timeout=60).json()
    return told


def silent(port: int, path: str, *, is_websocket: bool) -> socket.socket:
    """A client that asks, and then never reads."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.settimeout(60)
    reader.connect(("127.0.0.1", port))
    upgrade = (
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    reader.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{upgrade if is_websocket else ''}\r\n".encode())
    return reader


def is_cut_off(reader: socket.socket) -> bool:
    try:
        while reader.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_fault_77_a_reader_that_never_reads(port, kind):
    before = state(port)
    slow = [silent(port, f"/slow-{kind}-{number}", is_websocket=kind == "websocket") for number in range(4)]
    names = {f"/slow-{kind}-{number}" for number in range(4)}
    until(lambda: names <= set(state(port)["sent"]))
    # Another one, meanwhile, hears everything.
    if kind == "http":
        assert len(httpx.get(f"http://127.0.0.1:{port}/quick-http", timeout=120).content) == WHOLE
    else:
        with connect(f"ws://127.0.0.1:{port}/quick-websocket", compression=None, max_size=None) as quick:
            assert sum(len(quick.recv(timeout=60)) for _ in range(PIECES)) == WHOLE
    until(lambda: names <= set(state(port)["left"]))
    after = state(port)
    for name in names:
        # A few MiB are the kernel's; the rest was never made.
        assert after["sent"][name] < PIECES // 2
    assert after["peak_kib"] - before["peak_kib"] < 32 * 1024
    for reader in slow:
        assert is_cut_off(reader)
        reader.close()


def is_uvicorn(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["port"] == UVICORN)


def said(port: int, text: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(text)
    return client


def test_who_does_not_come_to_the_end_of_a_request_is_cut_off(port):
    """Slowloris: a byte now and then keeps no connection open."""
    begun = {
        "nothing": b"",
        "request line": b"GET /up",
        "headers": b"GET /upload HTTP/1.1\r\nX-Slow: ",
    }
    waiting = {name: said(port, text) for name, text in begun.items()}
    for client in waiting.values():
        client.settimeout(0.2)
    deadline = time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        for name, client in list(waiting.items()):
            try:
                if name != "nothing":
                    client.sendall(b"x")
                assert client.recv(100) == b"", "it was cut off, not answered"
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            client.close()
            del waiting[name]
    assert not waiting


@pytest.mark.parametrize("is_first", [True, False])
def test_whose_body_comes_too_slowly_hears_why(port, is_first):
    """Also on a connection that has been used before; then it ends. In the words of the application."""
    with said(port, b"GET /state HTTP/1.1\r\nHost: x\r\n\r\n" * (not is_first)) as client:
        if not is_first:
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
        client.sendall(
            b"POST /upload?now=1 HTTP/1.1\r\nHost: x\r\nX-Name: a\r\nContent-Length: 100000\r\n\r\n"
        )
        client.settimeout(0.2)
        answer = b""
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            try:
                client.sendall(b"x")  # goes on dripping, also after the answer
                piece = client.recv(65_536)
            except TimeoutError:
                continue
            if not piece:
                break
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 408 Request Timeout"
    assert {f"Content-Length: {len(body)}", "Connection: close", "X-Said: a"} <= set(lines)
    assert json.loads(body) == {"method": "POST", "path": "/upload", "query": "now=1"}


def test_a_body_is_slow_behind_an_answer_that_has_begun(port, request):
    """Then nothing is said: words would stand in the middle of that answer."""
    if not is_uvicorn(request):
        return  # Daphne asks no application before a body is whole
    begun = b"POST /begun HTTP/1.1\r\nHost: x\r\nX-Name: a\r\nContent-Length: 100000\r\n\r\nx"
    answer = b""
    with said(port, begun) as client, contextlib.suppress(ConnectionError):
        while piece := client.recv(65_536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_that_keeps_coming_is_taken(port):
    with httpx.Client(timeout=60) as client:
        for _ in range(2):  # on one connection
            answer = client.post(f"http://127.0.0.1:{port}/upload", content=iter([b"x" * 65_536] * 64))
            assert answer.text == str(65_536 * 64)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_message_that_is_too_large_is_told_so(port, parts):
    """And not taken into memory."""
    with connect(f"ws://127.0.0.1:{port}/large-{parts}", proxy=None) as client:
        with contextlib.suppress(ConnectionClosed):  # before all of it was sent
            client.send("x" * 1_500_000 if parts == 1 else ["x" * 500_000] * parts)
        with contextlib.suppress(ConnectionClosed):
            for _ in range(PIECES):
                client.recv(timeout=60)
        assert client.close_code == 1009


@pytest.mark.parametrize("are_complete", [True, False])
def test_headers_have_a_bound(port, request, are_complete):
    size = (64 if is_uvicorn(request) else 16) * 1024
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(size // 1000 + 1))
    with said(port, b"GET /state HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" * are_complete) as client:
        answer = b""
        try:
            while piece := client.recv(65_536):
                answer += piece
        except ConnectionError:
            pass  # what it had not read yet when it closed
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    if is_uvicorn(request):
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    with said(port, b"GET /state HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"x" * 8000)) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
