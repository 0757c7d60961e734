"""Connections to PostgreSQL that wait for a slow statement, and not for a server that stands still.

A statement's own time limit is the server's to keep, which a server that hangs does not; TCP's limits see a kernel that
still answers for it. A limit here would end reports and exports that only take long. Behind a pooler it is the pooler
that is asked.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import ConnectionTimeout

_SILENT_S: Final = 2.0
"""After each so long without a byte on the connection it is asked whether the server takes another one."""
_ANSWER_S: Final = 3
"""So long may that take: both together as long as the pool waits for a connection."""
_Result = TypeVar("_Result")


class PatientConnection(psycopg.Connection[Any]):
    """Raises OperationalError from a wait in which the server stopped to answer anybody, and is closed then."""

    def wait(self, gen: PQGen[_Result], *args: Any, **kwargs: Any) -> _Result:
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: PQGen[_Result]) -> Generator[Any, Any, _Result]:
        """psycopg sends what the socket is ready for, and nothing each tenth of a second while that is nothing."""
        heard_at: float | None = None
        try:
            state = next(gen)
            while True:
                ready = yield state
                if ready:
                    heard_at = None
                elif heard_at is None:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > _SILENT_S:
                    if not self._is_server_awake():
                        self.close()
                        raise psycopg.OperationalError("the server does not answer")
                    heard_at = time.monotonic()
                state = gen.send(ready)
        except StopIteration as stop:
            result: _Result = stop.value
            return result

    def _is_server_awake(self) -> bool:
        at = self.info
        try:
            psycopg.connect(
                at.dsn,
                # This one of those that may be named, found already.
                host=at.host,
                hostaddr=at.hostaddr or None,
                port=at.port,
                password=at.password or None,
                connect_timeout=_ANSWER_S,
            ).close()
        except ConnectionTimeout:
            return False
        except psycopg.Error:
            return True  # "too many clients" is an answer too
        return True
