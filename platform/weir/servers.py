"""The ASGI servers that a gateway can run on, and how each is started."""

from __future__ import annotations

from typing import Final

DAPHNE: Final = "daphne"
UVICORN: Final = "uvicorn"
GRANIAN: Final = "granian"
SERVERS: Final = (DAPHNE, UVICORN, GRANIAN)

_APPLICATION: Final = "weir.asgi:application"


def server_arguments(server: str, *, host: str, port: int) -> tuple[str, ...]:
    """What follows `python` to serve the gateway there."""
    if server == DAPHNE:
        return ("-m", "weir.daphne_server", "-v", "0", "-b", host, "-p", str(port), _APPLICATION)
    if server == UVICORN:
        return (
            *(
                "-m",
                "uvicorn",
                "--host",
                host,
                "--port",
                str(port),
                "--loop",
                "uvloop",
                "--http",
                "httptools",
            ),
            *("--ws", "websockets-sansio", "--lifespan", "off", "--no-access-log", "--log-level", "warning"),
            *("--no-server-header", "--no-proxy-headers", _APPLICATION),
        )
    if server == GRANIAN:
        return (
            *(
                "-m",
                "granian",
                "--interface",
                "asginl",
                "--host",
                host,
                "--port",
                str(port),
                "--workers",
                "1",
            ),
            *("--loop", "uvloop", "--log-level", "warning", "--no-access-log", _APPLICATION),
        )
    raise ValueError(f"no server is called {server!r}: choose one of {', '.join(SERVERS)}")
