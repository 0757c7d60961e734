"""How patient a gateway is, whatever it runs on; a proxy before it is as patient (`deploy/nginx/weir.conf`).

The servers know when a body comes too slowly (uvicorn_server.py, daphne_server.py), on Daphne before the application
hears of the request at all. What its client is told is the application's to say (asgi.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

STALL_S: Final = 30.0
"""Who reads nothing for so long is cut off."""
HEADERS_S: Final = 10.0
"""A request's line and headers come within it, counted from its first byte, or from the connection's begin."""
BODY_S: Final = 10.0
BODY_PACE: Final = 4096
"""So many bytes of a body come in each BODY_S, or the rest of it."""
LAST_READS_S: Final = 1.0
"""What a refused client still sends is read and forgotten for a moment: a connection that is closed before its input
is read is reset, and the client never learns why."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Iterable[tuple[str, str]]
    body: bytes

    def on_wire(self) -> bytes:
        """As HTTP/1.1 that ends its connection."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            *(f"{name}: {value}" for name, value in self.headers),
            f"Content-Length: {len(self.body)}",
            "Connection: close",
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


@dataclass(slots=True)
class SlowBodies:
    answer: Callable[[dict[str, Any]], Answer] = lambda _scope: Answer(HTTPStatus.REQUEST_TIMEOUT, (), b"")
    """To a request, by its ASGI scope, whose body comes too slowly."""


SLOW_BODIES: Final = SlowBodies()
"""Of this process."""
