"""What a gateway does when it is told to stop: takes nothing new, lets what is open end for a while, then breaks it off
with a word instead of cutting it.

The application says what that word is (asgi.py), the servers when it is time (daphne_server.py, uvicorn_server.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LAST_WORDS_S: Final = 2
"""After it was told to break off, an answer that is still open is cut."""


@dataclass(slots=True)
class Stopping:
    drain_s: int = 10
    """So long may open answers go on."""
    break_off: Callable[[], None] = lambda: None
    """Called once, in the event loop."""


STOPPING: Final = Stopping()
"""Of this process."""
