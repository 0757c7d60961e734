"""What a Redis URL says.

    redis://HOST:PORT/DB, rediss://..., unix:///PATH     one server
    redis+cluster://HOST:PORT, rediss+cluster://...      Redis Cluster; any of its nodes
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB      the master of that name, wherever Sentinel says that it is

User and password are the servers'. Sentinels that ask for a password of their own get `?sentinel_password=`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit

_KINDS: Final[dict[str, Literal["single", "cluster", "sentinel"]]] = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
}
_SENTINEL_PORT: Final = 26379
FORMS: Final = (
    "redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH, redis+cluster://HOST:PORT or "
    "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Passwords are left out of its repr."""

    kind: Literal["single", "cluster", "sentinel"]
    node_url: str = field(repr=False)
    """Of the one server, or of the cluster's named node; "" with Sentinel."""
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)


def parse(url: str) -> RedisAddress:
    """Raises ValueError, without the URL in it: there may be a password."""
    try:
        parts = urlsplit(url)
        kind = _KINDS[parts.scheme]
        if kind == "sentinel":
            return _sentinel(url)
        if not (parts.hostname or (parts.scheme == "unix" and parts.path.strip("/"))):
            raise ValueError("no host")
    except (KeyError, ValueError) as error:
        raise ValueError(f"a Redis URL is {FORMS}") from error
    return RedisAddress(kind, url.replace("+cluster", "", 1) if kind == "cluster" else url)


def _sentinel(url: str) -> RedisAddress:
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, _, db = parts.path.strip("/").partition("/")
    sentinels = []
    for host in hosts.split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise ValueError("no host")
        sentinels.append((one.hostname, one.port or _SENTINEL_PORT))
    if not service:
        raise ValueError("no service")
    own = parse_qs(parts.query).get("sentinel_password")
    return RedisAddress(
        kind="sentinel",
        node_url="",
        sentinels=tuple(sentinels),
        service=service,
        db=int(db or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_password=own[0] if own else None,
    )
