"""When each key was last used, written at most once a minute for each key, never in a request's path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final

from django.db import DatabaseError, connection
from django.utils import timezone

WRITE_EVERY_S: Final = 60.0

# Several gateways write the same row: the later moment stays, and one that is under a minute newer is
# not worth a write. A key that was deleted meanwhile is skipped.
_UPSERT: Final = """
INSERT INTO tenants_apikeyuse (api_key_id, last_used_at)
SELECT used.id, used.at FROM unnest(%s::bigint[], %s::timestamptz[]) AS used (id, at)
JOIN tenants_apikey ON tenants_apikey.id = used.id ORDER BY used.id
ON CONFLICT (api_key_id) DO UPDATE SET last_used_at = EXCLUDED.last_used_at
WHERE tenants_apikeyuse.last_used_at < EXCLUDED.last_used_at - interval '59 seconds'
"""


class KeyUseLog:
    """Collects on the event loop, writes from a database thread."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, datetime] = {}
        self._written_at: dict[int, float] = {}

    def touch(self, key_id: int) -> None:
        written_at = self._written_at.get(key_id)
        if written_at is None or self._clock() - written_at >= WRITE_EVERY_S:
            with self._lock:
                self._waiting[key_id] = timezone.now()

    def flush(self) -> None:
        """Writes what is due. A failure (a read-only replica, say) must not stop anyone from working."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        now = self._clock()
        self._written_at = {k: at for k, at in self._written_at.items() if now - at < WRITE_EVERY_S}
        self._written_at |= dict.fromkeys(waiting, now)
        try:
            with connection.cursor() as cursor:
                cursor.execute(_UPSERT, [list(waiting), list(waiting.values())])
        except DatabaseError:
            return
