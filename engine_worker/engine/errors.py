"""What the engine raises. A module of its own, so that computing steps needs nothing of the wire format."""

from __future__ import annotations


class EngineFailure(Exception):
    """Root of the engine's errors.

    EngineFailure
    ├── InvalidRequest      the caller's fault; the message says what to change
    ├── DuplicateRequest    the id is in use
    ├── UnsupportedModel    at start: this architecture is not served
    └── EngineDead          the loop has stopped; nothing more will come
    """


class InvalidRequest(EngineFailure): ...


class DuplicateRequest(EngineFailure): ...


class UnsupportedModel(EngineFailure): ...


class EngineDead(EngineFailure): ...
