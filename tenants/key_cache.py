"""Keys that a gateway knows, and how it notices that one changed.

A cached key is trusted only together with an auth epoch (models/auth_epoch.py) that was read less
than `EPOCH_FRESH_S` ago and equals the one under which the key was loaded. So:

- A warm key costs no query, but each process asks for the epoch about twice a second while it serves:
  one tiny query, whatever the number of keys. A revocation reaches every gateway within that time.
- An entry carries the epoch that was known *before* its row was read. A load that overlaps a revocation
  is filed under the old epoch and read again: it can't bring the key back.
- With the database down, known keys go on being served for `SERVE_STALE_S`, without waiting for it; a key
  that is not known here, or that may have changed, raises KeyUnavailable. Revoking needs the database, so
  nothing can be missed meanwhile, short of this gateway alone being cut off: that is what bounds the time.
- Redis has no part in it: its loss neither opens a hole nor delays anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from tenants.key_use import KeyUseLog
from tenants.key_verdict import Verdict, judge
from tenants.principal_selectors import StoredKey, find_stored_key, read_auth_epoch

EPOCH_FRESH_S: Final = 0.5
SERVE_STALE_S: Final = 600.0
_UNKNOWN_TTL_S: Final = 1.0
"""How long it is remembered that there is no such key, so that one bad client does not query at each call."""
_RECHECK_S: Final = 0.1
"""So often at most a wrong secret for a key that is known makes us read the key again."""
_DATABASE_TIMEOUT_S: Final = 3.0
"""A key that is not known here waits so long for its row: a busy database, just after a deployment say, is not away."""
_KNOWN_WAIT_S: Final = 1.0
"""Known ones wait so long for the epoch, and are served as last seen then, while it is still being read."""
_DATABASE_RETRY_S: Final = 1.0
"""After a failure the epoch is asked for again only after this long: known keys don't wait for a dead database."""
_CAPACITY: Final = 10_000

_T = TypeVar("_T")


class KeyUnavailable(Exception):
    """Neither the cache nor the database can say what this key is."""


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredKey | None
    epoch: UUID | None
    loaded_at: float
    rechecked_at: float = float("-inf")


class KeyCache:
    """One per event loop. `load_key` and `load_epoch` run in threads of its own."""

    def __init__(
        self,
        *,
        load_key: Callable[[str], StoredKey | None] = find_stored_key,
        load_epoch: Callable[[], UUID | None] = read_auth_epoch,
        clock: Callable[[], float] = time.monotonic,
        database_timeout_s: float = _DATABASE_TIMEOUT_S,
        known_wait_s: float = _KNOWN_WAIT_S,
        capacity: int = _CAPACITY,
    ) -> None:
        self._load_key = load_key
        self._load_epoch = load_epoch
        self._clock = clock
        self._timeout_s = database_timeout_s
        self._known_wait_s = known_wait_s
        self._capacity = capacity
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._loading: dict[str, asyncio.Task[StoredKey | None]] = {}
        self._epoch: UUID | None = None
        self._epoch_at = float("-inf")
        self._failed_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_began_at = float("-inf")
        self._uses = KeyUseLog(clock=clock)
        # Not Django's one shared thread: a hung database must not hold up whatever else waits for it.
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="key-cache")

    async def get(self, lookup_id: str, digest: bytes) -> StoredKey | None:
        """The key as it is now, or None when there is none. Raises KeyUnavailable."""
        await self._refresh_epoch()
        entry = self._entries.get(lookup_id)
        if entry is not None and self._may_serve(entry):
            self._entries.move_to_end(lookup_id)
            stored = entry.stored
            if self._may_be_newer(entry, digest):
                # Rotated this very moment, perhaps: its new secret is here before the epoch.
                stored = await self._load(lookup_id, digest)
                if (loaded := self._entries.get(lookup_id)) is not None:
                    self._entries[lookup_id] = replace(loaded, rechecked_at=self._clock())
        else:
            stored = await self._load(lookup_id, digest)
        self._touch(stored, digest)
        return stored

    def _may_be_newer(self, entry: _Entry, digest: bytes) -> bool:
        wrong = entry.stored is not None and judge(entry.stored, digest) is Verdict.INVALID
        return wrong and self._clock() - entry.rechecked_at > _RECHECK_S

    def _touch(self, stored: StoredKey | None, digest: bytes) -> None:
        if stored is not None and judge(stored, digest) is Verdict.GOOD:
            assert stored.principal.key_id is not None
            self._uses.touch(stored.principal.key_id)

    def _may_serve(self, entry: _Entry) -> bool:
        if entry.epoch != self._epoch:
            # Something changed since it was loaded. That holds with the database down as well: a key that
            # may have been revoked is not served until it was read again.
            return False
        now = self._clock()
        if entry.stored is None:
            return now - entry.loaded_at <= _UNKNOWN_TTL_S
        return now - self._epoch_at <= SERVE_STALE_S

    async def _refresh_epoch(self) -> None:
        now = self._clock()
        if now - self._epoch_at <= EPOCH_FRESH_S:
            return
        in_trouble = self._failed_at > self._epoch_at
        if self._refreshing is None and not (in_trouble and now - self._failed_at <= _DATABASE_RETRY_S):
            self._refresh_began_at = now
            # For everybody: not in the context of the request that found the last one too old.
            self._refreshing = asyncio.create_task(
                self._refresh_once(), name="refresh-auth-epoch", context=Context()
            )
        if self._refreshing is not None and not in_trouble:
            # Not awaited itself: a caller that leaves must not stop it for the others.
            left = self._refresh_began_at + self._known_wait_s - now
            await asyncio.wait([self._refreshing], timeout=max(0.0, left))
        # In trouble nobody waits: known keys are served as last seen, while one task goes on asking.

    async def _refresh_once(self) -> None:
        asked_at = self._clock()
        try:
            epoch = await self._in_thread(self._read_epoch)
        except KeyUnavailable:
            self._failed_at = self._clock()
        else:
            # The time before the query: what it read may be that old.
            self._epoch, self._epoch_at = epoch, asked_at
        finally:
            self._refreshing = None

    def _read_epoch(self) -> UUID | None:
        epoch = self._load_epoch()
        self._uses.flush()
        return epoch

    def _read_key(self, lookup_id: str, digest: bytes) -> StoredKey | None:
        stored = self._load_key(lookup_id)
        # The first use of a key is on record at once, the later ones with the next look at the epoch.
        self._touch(stored, digest)
        self._uses.flush()
        return stored

    async def _load(self, lookup_id: str, digest: bytes) -> StoredKey | None:
        if self._failed_at > self._epoch_at and self._clock() - self._failed_at <= _DATABASE_RETRY_S:
            raise KeyUnavailable("the database did not answer a moment ago")
        # One query however many requests wait for it; shielded, as one that leaves must not fail the others.
        task = self._loading.get(lookup_id)
        if task is None:
            task = asyncio.create_task(self._load_once(lookup_id, digest), name=f"load-key-{lookup_id}")
            self._loading[lookup_id] = task
            task.add_done_callback(lambda done: self._loaded(lookup_id, done))
        return await asyncio.shield(task)

    async def _load_once(self, lookup_id: str, digest: bytes) -> StoredKey | None:
        epoch = self._epoch  # before the row is read: see above
        stored = await self._in_thread(lambda: self._read_key(lookup_id, digest))
        self._entries[lookup_id] = _Entry(stored, epoch, self._clock())
        self._entries.move_to_end(lookup_id)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return stored

    def _loaded(self, lookup_id: str, task: asyncio.Task[StoredKey | None]) -> None:
        self._loading.pop(lookup_id, None)
        if not task.cancelled():
            task.exception()  # seen: those who waited got it, and there may be none left

    async def _in_thread(self, read: Callable[[], _T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, _with_connection, read)
        except (DatabaseError, InterfaceError, TimeoutError) as error:
            raise KeyUnavailable(str(error)) from error


def _with_connection(read: Callable[[], _T]) -> _T:
    close_old_connections()
    try:
        return read()
    finally:
        # With a connection pool this hands it back, without one it leaves none open behind.
        connection.close()
