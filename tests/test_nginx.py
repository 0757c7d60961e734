"""The shipped nginx configuration in a real nginx: nothing is held back, and what is private stays so."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websockets
from django.db import connection

from tests.e2e.site import MODEL, ROOT, TOKENS_PER_S, Site, running_site, wait_until
from tests.factories import make_key, make_tenant

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
SHIPPED = (ROOT / "deploy" / "nginx" / "weir.conf").read_text()

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture(scope="module")
def site(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with running_site(connection.settings_dict, tmp_path_factory.mktemp("nginx-site")) as site:
        yield site


@pytest.fixture(scope="module")
def front(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx with the shipped file, but for its ports, names and certificate."""
    home = tmp_path_factory.mktemp("nginx")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = re.sub(r"(?ms)^server \{\n    listen 80;.*?^\}\n", "", SHIPPED)
    conf = conf.replace("127.0.0.1:8000", f"127.0.0.1:{site.port}").replace("weir.example.com", "localhost")
    conf = conf.replace("listen 443 ssl http2", f"listen 127.0.0.1:{port}")
    conf = re.sub(r"(?m)^    ssl_.*\n", "", conf)
    conf, slow = re.subn(r"(client_(?:header|body)_timeout) 10s", r"\1 1s", conf)
    assert slow == 2
    paths = "".join(
        f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = home / "nginx.conf"
    main.write_text(
        f"daemon off; user root; pid {home}/pid; error_log {home}/error.log;\nevents {{}}\n"
        f"http {{ access_log off; {paths}\n{conf}\n}}\n"
    )
    assert NGINX
    subprocess.run([NGINX, "-t", "-q", "-e", home / "error.log", "-c", main], check=True, timeout=20)
    nginx = subprocess.Popen([NGINX, "-e", home / "error.log", "-c", main])
    try:
        url = f"http://localhost:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{url}/healthz", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "nginx", home / "error.log", 20)
        yield url
    finally:
        nginx.terminate()
        nginx.wait(10)


def test_the_first_event_comes_at_once(front: str):
    """FAULTS 78."""
    tokens = 60
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    headers = {"Authorization": f"Bearer {make_key(make_tenant()).secret}", "Accept-Encoding": "gzip"}
    arrived: list[float] = []
    with httpx.stream(
        "POST", f"{front}/v1/chat/completions", json=body, headers=headers, timeout=30
    ) as answer:
        assert answer.status_code == 200
        assert "content-encoding" not in answer.headers
        arrived = [time.monotonic() for line in answer.iter_lines() if line.startswith("data:")]
    took = tokens / TOKENS_PER_S
    assert len(arrived) > tokens / 2
    assert arrived[-1] - arrived[0] > took / 2, "the events came in one piece"
    assert max(late - early for early, late in itertools.pairwise(arrived)) < took / 2


def test_a_websocket_passes(front: str):
    async def visit() -> str:
        url = front.replace("http", "ws", 1) + "/ws/chat"
        async with asyncio.timeout(20), websockets.connect(url, origin=front.rsplit(":", 1)[0]) as socket:
            return str(await socket.recv())

    assert "signed_out" in asyncio.run(visit())


def test_what_is_for_the_operator_is_not_for_the_world(front: str):
    assert httpx.get(f"{front}/metrics", timeout=5).status_code == 404
    assert httpx.get(f"{front}/readyz", timeout=5).status_code == 404
    large = httpx.post(f"{front}/v1/chat/completions", content=b"x" * (5 << 20), timeout=20)
    assert large.status_code == 413


def test_a_batchs_file_may_be_larger_than_other_bodies(front: str):
    key = make_key(make_tenant()).secret
    upload = httpx.post(
        f"{front}/v1/files",
        files={"file": ("lines.jsonl", b"x" * (5 << 20))},
        data={"purpose": "batch"},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert upload.status_code != 413


@pytest.mark.parametrize("path", ["/login/", "/admin/login/"])
def test_guessing_passwords_is_slow(front: str, path: str):
    with httpx.Client(base_url=front, timeout=20) as client:
        seen = [client.get(path).status_code for _ in range(14)]
        assert seen.count(429) >= 2
        assert client.get("/docs/").status_code == 200, "the rest goes on"


def test_headers_that_are_too_large_are_431(front: str):
    answer = httpx.get(f"{front}/healthz", headers={"x-large": "x" * 40_000}, timeout=20)
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "headers_too_large"
    many = {f"x-{number}": "x" * 4000 for number in range(40)}
    assert httpx.get(f"{front}/healthz", headers=many, timeout=20).status_code == 431


@pytest.mark.parametrize(
    "begun",
    [
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    ],
    ids=["headers", "body"],
)
def test_a_client_that_never_finishes_its_request_is_cut(front: str, begun: str):
    """Slowloris: a hundred of them, and others are served meanwhile."""
    port = int(front.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(100)]
    try:
        for connection_ in slow:
            connection_.sendall(begun.encode())
        assert httpx.get(f"{front}/healthz", timeout=20).status_code == 200
        for connection_ in slow:
            while connection_.recv(4096):  # perhaps a 408, then the end
                pass
    finally:
        for connection_ in slow:
            connection_.close()
