"""The ASGI servers that a gateway can run on, and how each is started: docs/adr/0027-gateway-server.md."""

from __future__ import annotations

from typing import Final

DAPHNE: Final = "daphne"
UVICORN: Final = "uvicorn"
SERVERS: Final = (DAPHNE, UVICORN)
"""Those that bound what a client costs that does not read."""
GRANIAN: Final = "granian"
"""Does not: it takes whatever is sent into a queue without end. Measured beside the others, never offered."""
PRODUCTION: Final = UVICORN

WEBSOCKET_MESSAGE_MAX: Final = 1 << 20
"""Bytes of a message; a larger one ends the connection with close code 1009."""

_APPLICATION: Final = "weir.asgi:application"


def server_arguments(server: str, *, host: str, port: int) -> tuple[str, ...]:
    """What follows `python` to serve the gateway there."""
    if server == DAPHNE:
        return ("-m", "weir.daphne_server", "-v", "0", "-b", host, "-p", str(port), _APPLICATION)
    if server == UVICORN:
        return ("-m", "weir.uvicorn_server", "--host", host, "--port", str(port))
    if server == GRANIAN:
        return (
            *("-m", "granian", "--interface", "asginl", "--host", host, "--port", str(port)),
            *(
                "--workers",
                "1",
                "--loop",
                "uvloop",
                "--log-level",
                "warning",
                "--no-access-log",
                _APPLICATION,
            ),
        )
    raise ValueError(f"no server is called {server!r}: choose one of {', '.join(SERVERS)}")
