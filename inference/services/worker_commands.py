"""Models loaded on and unloaded from worker processes that run: by an operator, on record, with the outcome.

The row is written before the command goes out, and ended once by whoever first sees the answer; where the process is
gone, or never took it, by the timetable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import structlog
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from engine_worker.broker import BrokerUnavailable, ControlBroker, GatewayBroker
from engine_worker.broker.commands import ModelAnswer, ModelCommand, ProcessStatus
from inference.models import CommandAction, CommandState, WorkerCommand
from tenants.services import Actor, record_audit

log = structlog.get_logger(__name__)

_TIMEOUT_S: Final = 2.0
_SETTLED_S: Final = 3.0
"""A command that was taken is in the process's next heartbeat, or its answer is there."""


class WorkerGone(Exception):
    """No process of that id is alive, or it takes no commands; the message says which."""


class CommandUnderway(Exception):
    """Another command for the same model on the same process has not ended."""


class Standing(Enum):
    """Of an open command."""

    WAITING = "waiting"
    AT_WORK = "at_work"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class _Seen:
    answers: dict[str, ModelAnswer]
    standings: dict[str, Standing]


def command_worker(
    *, actor: Actor, worker_id: str, action: CommandAction, model: str, source: str = ""
) -> WorkerCommand:
    """The same command while the first is open is that one.

    Raises WorkerGone, CommandUnderway, BrokerUnavailable, django.core.exceptions.ValidationError.
    """
    process = async_to_sync(_process)(worker_id)
    command = WorkerCommand(
        worker_id=worker_id, action=action, model=model, source=source, models_before=process.models,
        asked_by=actor.label,
    )  # fmt: skip
    command.full_clean(validate_unique=False, validate_constraints=False)
    _refuse_words(command)
    try:
        with transaction.atomic():
            command.save(force_insert=True)
            record_audit(
                actor=actor,
                action=f"worker.{action}_model",
                tenant=None,
                target=command,
                before={"worker": worker_id, "models": process.models},
                after={"model": model, "source": source},
            )
    except IntegrityError:
        return _open_one(command)
    try:
        async_to_sync(_send)(command)
    except BrokerUnavailable as error:
        _end(command, CommandState.LOST, outcome=f"It could not be sent: {error}")
        raise
    return command


def collect_answers() -> dict[str, Standing]:
    """Ends the commands that are answered, and says how the others stand, by public id. Raises BrokerUnavailable."""
    commands = list(WorkerCommand.objects.filter(state=CommandState.OPEN))
    if not commands:
        return {}
    seen = async_to_sync(_look)(commands)
    for command in commands:
        if (answer := seen.answers.get(str(command.public_id))) is not None:
            _end(
                command,
                CommandState.REFUSED if answer.error else CommandState.DONE,
                outcome=answer.error,
                refusal=answer.code,
                models=answer.models,
            )
    return seen.standings


def settle_commands() -> None:
    """The timetable's: the same, and ends those that nobody will answer."""
    if not any(standing is Standing.MISSING for standing in collect_answers().values()):
        return
    time.sleep(_SETTLED_S)
    missing = {key for key, standing in collect_answers().items() if standing is Standing.MISSING}
    for command in WorkerCommand.objects.filter(state=CommandState.OPEN, public_id__in=missing):
        _end(command, CommandState.LOST, outcome="Its process ended before it answered.")


def _refuse_words(command: WorkerCommand) -> None:
    if not command.model.isprintable() or set(command.model) & set("{}:"):
        raise ValidationError({"model": "A model's name has no braces, colons or control characters."})
    if not command.source.isprintable():
        raise ValidationError({"source": "A path has no control characters."})
    if command.action == CommandAction.LOAD and not command.source:
        raise ValidationError({"source": "Say where the model is."})


def _open_one(command: WorkerCommand) -> WorkerCommand:
    known = WorkerCommand.objects.filter(
        state=CommandState.OPEN, worker_id=command.worker_id, model=command.model
    ).first()
    if known is not None and (known.action, known.source) == (command.action, command.source):
        return known
    raise CommandUnderway(
        f"The command to {known} has not ended."
        if known
        else f"Another command for {command.model} ended just now: look at it."
    )


@transaction.atomic
def _end(
    command: WorkerCommand,
    state: CommandState,
    *,
    outcome: str = "",
    refusal: str = "",
    models: list[str] | None = None,
) -> None:
    ended: dict[str, Any] = {"state": state, "outcome": outcome, "refusal": refusal, "models_after": models}
    still_open = WorkerCommand.objects.filter(pk=command.pk, state=CommandState.OPEN)
    if not still_open.update(ended_at=timezone.now(), **ended):
        return  # somebody else has seen it
    record_audit(
        actor=Actor.system(f"worker {command.worker_id}"[:254]),
        action=f"worker.{command.action}_{state}",
        tenant=None,
        target=command,
        before={"worker": command.worker_id, "models": command.models_before},
        after={"models": models, **({"why": outcome} if outcome else {})},
    )
    log.info(
        "worker_command_ended", worker_id=command.worker_id, action=command.action, model=command.model,
        state=str(state), outcome=outcome,
    )  # fmt: skip


async def _process(worker_id: str) -> ProcessStatus:
    control = ControlBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    gateway = GatewayBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        for process in await control.processes():
            if process.worker_id == worker_id:
                return process
        alive = {worker.worker_id for worker in await gateway.workers()}
    finally:
        await control.aclose()
        await gateway.aclose()
    if worker_id in alive:
        raise WorkerGone(
            f"The worker {worker_id} serves one model and takes no commands: start it with --max-models above 1."
        )
    raise WorkerGone(f"No worker {worker_id} is alive.")


async def _send(command: WorkerCommand) -> None:
    control = ControlBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        await control.send(
            command.worker_id,
            ModelCommand(
                command_id=str(command.public_id),
                action=command.action,
                model=command.model,
                source=command.source,
            ),
        )
    finally:
        await control.aclose()


async def _look(commands: Iterable[WorkerCommand]) -> _Seen:
    seen = _Seen({}, {})
    control = ControlBroker(settings.REDIS_URL, timeout_s=_TIMEOUT_S)
    try:
        # In this order: what is taken and answered meanwhile is seen at one of the three places.
        queued = {
            worker: set(await control.waiting(worker)) for worker in {one.worker_id for one in commands}
        }
        processes = {process.worker_id: process for process in await control.processes()}
        for command in commands:
            key = str(command.public_id)
            if (answer := await control.answer_to(key)) is not None:
                seen.answers[key] = answer
                continue
            process = processes.get(command.worker_id)
            if process is not None and process.command_id == key:
                seen.standings[key] = Standing.AT_WORK
            elif process is not None and key in queued[command.worker_id]:
                seen.standings[key] = Standing.WAITING
            else:
                seen.standings[key] = Standing.MISSING
    finally:
        await control.aclose()
    return seen
