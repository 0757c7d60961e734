"""The wire format between operators and worker processes: which models to serve. It promises what protocol.py does."""

from __future__ import annotations

from typing import Final

import msgspec

from engine_worker.protocol import this_version


class ModelCommand(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Operator -> worker process: serve a model more, or one less."""

    command_id: str
    action: str
    """`load` or `unload`."""
    model: str
    """The name that clients use."""
    source: str = ""
    """Where a model to load is, on the worker's machine: what `--model` takes."""
    v: int = msgspec.field(default_factory=this_version)


class Refusal:
    """Codes of a ModelAnswer."""

    MEMORY: Final = "not_enough_memory"
    NOT_FOUND: Final = "model_not_found"
    UNSERVABLE: Final = "model_not_servable"
    SERVED: Final = "name_in_use"
    NOT_SERVED: Final = "not_served"
    FULL: Final = "no_place"
    MALFORMED: Final = "malformed"


class ModelAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker process -> operator, when the command is done."""

    command_id: str
    models: list[str]
    """What it serves now."""
    error: str = ""
    """Why the command could not be done."""
    code: str = ""
    """The same for a program: see Refusal."""
    v: int = msgspec.field(default_factory=this_version)


class ProcessStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker process that obeys ModelCommands -> Redis, about once a second; also while it serves nothing."""

    worker_id: str
    started_at_ms: int
    updated_at_ms: int
    max_models: int
    models: list[str]
    """What it serves now."""
    command_id: str = ""
    """The command that it is at."""
    host: str = ""
    device: str = ""
    v: int = msgspec.field(default_factory=this_version)
