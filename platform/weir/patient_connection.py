"""Connections to PostgreSQL that wait for a slow statement, and not for a server that stands still.

A statement's own time limit is the server's to keep, which a server that hangs does not; TCP's limits see a kernel that
still answers for it. A limit here would end reports and exports that only take long. A pooler takes connections for a
server that hangs: where it answers nothing on them, and did not for a while, there is none behind it.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Generator
from contextlib import closing
from enum import Enum, auto
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import ConnectionTimeout

_SILENT_S: Final = 2.0
"""After each so long without a byte on the connection it is asked whether the server takes another one."""
_ANSWER_S: Final = 3
"""So long may that take: both together as long as the pool waits for a connection."""
_UNSERVED_S: Final = 20.0
"""So long may a pooler that takes connections have no server for them: it may only have none free."""
_Result = TypeVar("_Result")


class _Server(Enum):
    AWAKE = auto()
    UNSERVED = auto()
    """It takes connections, and answers nothing on them."""
    ASLEEP = auto()


class PatientConnection(psycopg.Connection[Any]):
    """Raises OperationalError from a wait in which the server stopped to answer anybody, and is closed then."""

    def wait(self, gen: PQGen[_Result], *args: Any, **kwargs: Any) -> _Result:
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: PQGen[_Result]) -> Generator[Any, Any, _Result]:
        """psycopg sends what the socket is ready for, and nothing each tenth of a second while that is nothing."""
        silent_since: float | None = None
        asked_at = 0.0
        try:
            state = next(gen)
            while True:
                ready = yield state
                if ready:
                    silent_since = None
                elif silent_since is None:
                    silent_since = asked_at = time.monotonic()
                elif time.monotonic() - asked_at > _SILENT_S:
                    server = self._look()
                    asked_at = time.monotonic()
                    if server is _Server.AWAKE:
                        silent_since = asked_at
                    elif server is _Server.ASLEEP or asked_at - silent_since > _UNSERVED_S:
                        self.close()
                        raise psycopg.OperationalError("the server does not answer")
                state = gen.send(ready)
        except StopIteration as stop:
            result: _Result = stop.value
            return result

    def _look(self) -> _Server:
        at = self.info
        try:
            other = psycopg.connect(
                at.dsn,
                # This one of those that may be named, found already.
                host=at.host,
                hostaddr=at.hostaddr or None,
                port=at.port,
                password=at.password or None,
                connect_timeout=_ANSWER_S,
            )
            with closing(other):  # its own `with` would wait to commit
                return _Server.AWAKE if _answers(other) else _Server.UNSERVED
        except ConnectionTimeout:
            return _Server.ASLEEP
        except psycopg.Error:
            return _Server.AWAKE  # "too many clients" is an answer too


def _answers(connection: psycopg.Connection[Any]) -> bool:
    asked = connection.pgconn
    asked.send_query(b"SELECT 1")
    until = time.monotonic() + _ANSWER_S
    with selectors.DefaultSelector() as selector:
        selector.register(asked.socket, selectors.EVENT_READ)
        while asked.is_busy():
            if not selector.select(max(0.0, until - time.monotonic())):
                return False
            asked.consume_input()
    return True
