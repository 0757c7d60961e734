"""POST to an address that a tenant named, and to nothing that it must not reach.

A name is resolved once and every address that it has is judged before any is connected to: one that is not public
(loopback, private, link-local, shared, multicast, and IPv4 in IPv6's clothes) refuses the request. The connection
goes to the address that was judged, so a name that answers differently the next time gains nothing. Redirects are
not followed, no proxy is asked, of the answer's body nothing is kept. Why not one of the libraries: docs/adr.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import certifi
import httpcore

Network = IPv4Network | IPv6Network
_ERRNO: Final = re.compile(r"^\[Errno -?\d+\] ")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_6TO4_AND_TEREDO: Final = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))


class Forbidden(Exception):
    """The address may not be reached from here."""


class Unreachable(Exception):
    """No answer: not found, refused, too late, or not spoken to in HTTP."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is somewhere in the internet; an address that carries another one is what that is."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if any(address in network for network in _6TO4_AND_TEREDO):
            return False
    return address.is_global and not address.is_multicast


def judged(host: str, port: int, *, is_plain: bool, allowed: Iterable[Network]) -> str:
    """An address of `host` that may be connected to. Raises Forbidden; OSError where it has none."""
    # Not every resolver knows a name with the root's dot for the same.
    found = socket.getaddrinfo(host.rstrip("."), port, type=socket.SOCK_STREAM)
    addresses = [ip_address(str(info[4][0]).partition("%")[0]) for info in found]
    for address in addresses:
        if any(address in network for network in allowed):
            continue
        if not is_public(address):
            raise Forbidden(f"{host} is not in the public internet")
        if is_plain:
            raise Forbidden("without TLS nothing is sent into the internet")
    return str(addresses[0])


def refuse_forbidden(url: str, *, timeout_s: float, allowed: Iterable[Network] = ()) -> str:
    """Raises Forbidden where `post` would, as far as it can be told now: a name that is not found, or not soon, may
    be there when it is sent to. Then returns what is the matter with it, else ""."""
    parts = urlsplit(url)
    host, is_plain = parts.hostname or "", parts.scheme == "http"
    port = parts.port or (80 if is_plain else 443)
    outcome: Future[str] = Future()

    def judge() -> None:
        try:
            outcome.set_result(judged(host, port, is_plain=is_plain, allowed=allowed))
        except Exception as error:
            outcome.set_exception(error)

    # A thread of its own: the system's resolver takes as long as it likes.
    threading.Thread(target=judge, name="judge-address", daemon=True).start()
    try:
        outcome.result(timeout_s)
    except Forbidden:
        raise
    except (UnicodeError, ValueError) as error:
        raise Forbidden("this is no address of the web") from error
    except TimeoutError:
        return f"{host} was not looked up within {timeout_s:g} s"
    except OSError:
        return f"{host} is not found"
    return ""


def post(
    url: str,
    *,
    headers: Sequence[tuple[str, str]],
    content: bytes,
    timeout_s: float,
    allowed: Iterable[Network] = (),
) -> int:
    """The status of the answer. `allowed`: networks that may be reached although they are not public, and then
    without TLS too. Raises Forbidden, Unreachable; returns or raises within about `timeout_s`."""
    backend = _Guarded(
        tuple(allowed), is_plain=url.startswith("http://"), ends_at=time.monotonic() + timeout_s
    )
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=_ssl_context(), network_backend=backend) as pool,
            pool.stream(
                "POST", url, headers=list(headers), content=content, extensions={"timeout": timeouts}
            ) as answer,
        ):
            return answer.status
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
        words = _ERRNO.sub("", str(error)) or type(error).__name__
        raise Unreachable(words[:200]) from error
    except (httpcore.UnsupportedProtocol, UnicodeError, ValueError) as error:
        raise Forbidden("this is no address of the web") from error


@cache
def _ssl_context() -> ssl.SSLContext:
    """Once a process: reading the authorities' certificates takes 40 ms."""
    return ssl.create_default_context(cafile=certifi.where())


class _Guarded(httpcore.NetworkBackend):
    """httpcore's own, behind the judgement. One for each request."""

    def __init__(self, allowed: tuple[Network, ...], *, is_plain: bool, ends_at: float) -> None:
        self._allowed, self._is_plain, self._ends_at = allowed, is_plain, ends_at
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        address = self._judged(host, port)
        stream = self._plain.connect_tcp(address, port, self._left(), local_address, socket_options)
        return _Bounded(stream, self._ends_at)

    def _judged(self, host: str, port: int) -> str:
        try:
            return judged(host, port, is_plain=self._is_plain, allowed=self._allowed)
        except OSError as error:
            raise httpcore.ConnectError("the name is not found") from error

    def _left(self) -> float:
        return max(0.01, self._ends_at - time.monotonic())


class _Bounded(httpcore.NetworkStream):
    """A stream whose every step ends with the request's time: who answers a byte now and then holds nobody up."""

    def __init__(self, stream: httpcore.NetworkStream, ends_at: float) -> None:
        self._stream, self._ends_at = stream, ends_at

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if (left := self._ends_at - time.monotonic()) <= 0:
            raise httpcore.ReadTimeout("the answer took too long")
        return self._stream.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if (left := self._ends_at - time.monotonic()) <= 0:
            raise httpcore.WriteTimeout("the request took too long")
        self._stream.write(buffer, left)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = max(0.01, self._ends_at - time.monotonic())
        return _Bounded(self._stream.start_tls(ssl_context, server_hostname, left), self._ends_at)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
