"""Addresses that a tenant gives: only public ones are connected to, and nobody holds the sender up."""

from __future__ import annotations

import socket
import threading
import time
from ipaddress import ip_address, ip_network

import pytest

from inference import guarded_http
from inference.guarded_http import Forbidden, Unreachable, is_public, post

NOT_PUBLIC = [
    "127.0.0.1", "127.8.9.1", "0.1.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.2.7", "198.18.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::",
]  # fmt: skip


def test_what_is_public():
    assert [text for text in NOT_PUBLIC if is_public(ip_address(text))] == []
    assert is_public(ip_address("93.184.215.14"))
    assert is_public(ip_address("2606:4700::1111"))
    assert is_public(ip_address("::ffff:93.184.215.14"))
    assert is_public(ip_address("64:ff9b::5db8:d70e"))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0x7f000001", "2130706433", "127.1", "[::ffff:127.0.0.1]", "0"],
)
def test_nothing_that_is_not_public_is_connected_to(host):
    """Not even to find that nobody listens: a tenant must not learn that either."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        for scheme in ("http", "https"):
            with pytest.raises(Forbidden):
                post(f"{scheme}://{host}:{listener.getsockname()[1]}/", headers=[], content=b"", timeout_s=5)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_name_is_resolved_once_and_judged_by_all_its_addresses(monkeypatch):
    """A name that answers differently the second time (DNS rebinding) gains nothing: nobody asks a second time."""
    answers = [["93.184.215.14", "127.0.0.1"], ["127.0.0.1"]]
    asked: list[str] = []
    connected: list[str] = []

    def resolve(host, port, **_):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[0]]

    def connect(self, host, *_):
        connected.append(host)
        raise guarded_http.httpcore.ConnectError("as far as it goes")

    monkeypatch.setattr(guarded_http.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(guarded_http.httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(Forbidden):
        post("https://evil.example/", headers=[], content=b"", timeout_s=5)
    assert connected == []
    answers[0] = ["93.184.215.14"]
    with pytest.raises(Unreachable):
        post("https://evil.example/", headers=[], content=b"", timeout_s=5)
    assert connected == ["93.184.215.14"]
    assert asked == ["evil.example"] * 2
    with pytest.raises(Forbidden, match="TLS"):
        post("http://evil.example/", headers=[], content=b"", timeout_s=5)


def test_who_answers_byte_by_byte_holds_nobody_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(40):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return
                    time.sleep(0.1)

        thread = threading.Thread(target=dribble)
        thread.start()
        began = time.monotonic()
        with pytest.raises(Unreachable):
            post(
                f"http://127.0.0.1:{listener.getsockname()[1]}/", headers=[], content=b"{}", timeout_s=0.5,
                allowed=[ip_network("127.0.0.0/8")],
            )  # fmt: skip
        assert time.monotonic() - began < 3.5
        thread.join(10)
