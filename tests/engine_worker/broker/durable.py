"""A Valkey that keeps its log on the disk, and may die: for tests that own it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis

from weir import embedded

HINTS = ("wake", "better", "moved", "pace:", "interval", "worker", "swept", "silent")
"""Keys that live for seconds and carry no request: their loss costs a poll."""


class DurableValkey:
    """Every call that it answered is on the disk: `appendfsync always`."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o755)
        self._server = embedded.prepare_valkey(home)
        self._log_dir = home / "valkey" / "appendonlydir"
        self.url = self._server.url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = embedded.start(self._server)
        with redis.Redis.from_url(self.url) as client:
            client.config_set("appendfsync", "always")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log_size(self) -> int:
        return self._log().stat().st_size

    def end_of_last_call(self, since: int) -> int:
        """Where all of it but its last word is written. What lapsed meanwhile may be logged behind it, or before."""
        written = self._log().read_bytes()[since:]
        is_transaction = b"EXEC" in written
        return since + (written.rindex(b"EXEC") if is_transaction else 1)

    def cut_to(self, size: int, home: Path) -> DurableValkey:
        """Another one, with what this had on the disk when its log was so long. Not started."""
        other = DurableValkey(home)
        shutil.copytree(self._log_dir, other._log_dir)
        with other._log().open("r+b") as log:
            log.truncate(size)
        if (unprivileged := embedded._unprivileged()) is not None:
            for path in (other._log_dir, *other._log_dir.iterdir()):
                shutil.chown(path, *unprivileged)
        return other

    def _log(self) -> Path:
        (log,) = self._log_dir.glob("*.incr.aof")
        return log


async def contents(url: str, prefix: str) -> dict[str, tuple[Any, bool]]:
    """What is under each key, and whether it will lapse; without the hints."""
    found: dict[str, tuple[Any, bool]] = {}
    async with Redis.from_url(url, protocol=2) as client:
        calls: dict[bytes, Any] = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"list": lambda key: client.lrange(key, 0, -1),
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            b"set": client.smembers,
            b"stream": client.xrange,
        }
        async for key in client.scan_iter():
            name = key.decode().removeprefix(prefix)
            if not name.startswith(HINTS):
                found[name] = await calls[await client.type(key)](key), await client.pttl(key) >= 0
    return found
