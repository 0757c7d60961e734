"""What the operator's routes take and give."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypedDict

import msgspec

from engine_worker.broker import DeadLetter, ModelQueue
from engine_worker.broker.commands import ProcessStatus
from engine_worker.protocol import WorkerStarting, WorkerStatus


class LoadModel(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=200, examples=["smollm2-360m"])]
    """What clients call it: no braces, colons or control characters."""
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1000, examples=["/models/smollm2-360m"])]
    """On the worker's machine: what `--model` takes."""


class CommandObject(msgspec.Struct, frozen=True):
    id: str
    worker_id: str
    action: str
    """`load` or `unload`."""
    model: str
    source: str
    state: str
    """`waiting` for its turn, `at_work` (loading or draining), `done`, `refused`, `lost`."""
    refusal: str
    """Why it was refused, for programs: engine_worker.broker.commands.Refusal."""
    outcome: str
    """The same in words."""
    models_before: list[str]
    models_after: list[str] | None
    """What the process serves since it answered."""
    asked_by: str
    created_at: datetime
    ended_at: datetime | None


class Fleet(TypedDict):
    workers: list[WorkerStatus]
    """Each model of each worker."""
    processes: list[ProcessStatus]
    """Those that take commands."""


class LiveState(Fleet):
    starting: list[WorkerStarting]
    """Those that do not serve yet."""
    models: list[ModelQueue]
    dead_letters: list[DeadLetter]
