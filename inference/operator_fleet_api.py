"""The operator's commands to the fleet as REST: which models a worker process serves.

Open to superusers by their session, with Django's CSRF token, and to programs by WEIR_OPERATOR_TOKEN; a tenant's key
opens nothing here.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from uuid import UUID

import msgspec
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from inference.api.api_errors import as_api_error
from inference.api.body import read_body
from inference.api.description import Operation, Operators
from inference.api.error_shapes import invalid_request, render_error
from inference.errors import ApiError, Conflict, MethodNotAllowed, NotAllowed, NotFound
from inference.models import CommandAction, CommandState, WorkerCommand
from inference.operator_api import read_live_state
from inference.schemas.operator import CommandObject, Fleet, LoadModel
from inference.services.worker_commands import (
    CommandUnderway,
    WorkerGone,
    collect_answers,
    command_worker,
)
from tenants.client_address import client_address
from tenants.models import ActorKind
from tenants.row_security import EVERYBODY, bound_to
from tenants.services import Actor

_View = Callable[..., HttpResponse]
_PROGRAM: Final = "operator's program"
"""In the audit log."""


def _operators(method: str, **tells: Any) -> Callable[[_View], _View]:
    """A view of who acts, which takes one method; `tells` is for its Operation."""
    methods = ("GET", "HEAD") if method == "GET" else (method,)

    def decorate(view: _View) -> _View:
        def by_session(request: HttpRequest, **path: Any) -> HttpResponse:
            if not request.user.is_superuser:
                return render_error(
                    request,
                    NotAllowed(
                        "This is for superusers: sign in as one, or send WEIR_OPERATOR_TOKEN as 'Authorization: Bearer "
                        "TOKEN'.",
                        code="operators_only",
                    ),
                )
            actor = Actor.person(request.user, ip_address=client_address(request))
            return view(request, actor, **path)

        protected = csrf_protect(by_session)

        @csrf_exempt  # a token is not a cookie; `by_session` is protected
        @wraps(view)
        def wrapped(request: HttpRequest, **path: Any) -> HttpResponse:
            try:
                if request.method not in methods:
                    allowed = ", ".join(methods)
                    raise MethodNotAllowed(
                        f"{request.method} is not allowed here, only {allowed}.",
                        code="method_not_allowed",
                        headers={"Allow": allowed},
                    )
                if _has_token(request):
                    actor = Actor(ActorKind.SYSTEM, _PROGRAM, ip_address=client_address(request))
                    with bound_to(EVERYBODY):
                        return view(request, actor, **path)
                return protected(request, **path)
            except Exception as error:
                return render_error(request, _told(error))

        operation = Operation(method, Operators.SUPERUSERS, view, **tells)
        wrapped.operations = (operation,)  # type: ignore[attr-defined]  # as in api/endpoint.py
        return wrapped

    return decorate


def _has_token(request: HttpRequest) -> bool:
    expected, given = settings.OPERATOR_TOKEN, request.headers.get("Authorization", "")
    return expected is not None and hmac.compare_digest(given.encode(), f"Bearer {expected}".encode())


def _told(error: Exception) -> ApiError:
    if isinstance(error, WorkerGone):
        return NotFound(f"{error} GET /operator/workers lists those that take any.", code="worker_not_found")
    if isinstance(error, CommandUnderway):
        return Conflict(f"{error} GET /operator/commands/ID says how one stands.", code="command_underway")
    if isinstance(error, ValidationError):
        return invalid_request(error)
    return as_api_error(error)


@_operators("GET", answer=Fleet)
def workers(request: HttpRequest, actor: Actor) -> HttpResponse:
    """The workers that live, and the processes that take commands."""
    state = async_to_sync(read_live_state)()
    return _json(Fleet(workers=state["workers"], processes=state["processes"]))


@_operators("POST", body=LoadModel, answer=CommandObject, status=202, errors=(404,))
def load_model(request: HttpRequest, actor: Actor, *, worker_id: str) -> HttpResponse:
    """Loads a model on a running worker."""
    asked = read_body(request, LoadModel)
    command = command_worker(
        actor=actor, worker_id=worker_id, action=CommandAction.LOAD, model=asked.model, source=asked.source
    )
    return _json(_object(command, "waiting"), status=202)


@_operators("DELETE", answer=CommandObject, status=202, errors=(404,))
def unload_model(request: HttpRequest, actor: Actor, *, worker_id: str, model: str) -> HttpResponse:
    """Unloads a model: takes nothing new for it, finishes what runs, frees its memory."""
    command = command_worker(actor=actor, worker_id=worker_id, action=CommandAction.UNLOAD, model=model)
    return _json(_object(command, "waiting"), status=202)


@_operators("GET", answer=CommandObject, errors=(404,))
def command(request: HttpRequest, actor: Actor, *, command_id: str) -> HttpResponse:
    """How a command stands."""
    standings = collect_answers()
    found = _found(command_id)
    if found is None:
        raise NotFound(
            "There is no such command. Look for its id in the answer to who gave it.",
            code="command_not_found",
        )
    standing = standings.get(str(found.public_id))
    return _json(_object(found, standing.value if standing else "waiting"))


def _found(command_id: str) -> WorkerCommand | None:
    try:
        public_id = UUID(command_id)
    except ValueError:
        return None
    return WorkerCommand.objects.filter(public_id=public_id).first()


def _object(command: WorkerCommand, standing: str) -> CommandObject:
    is_open = command.state == CommandState.OPEN
    return CommandObject(
        id=str(command.public_id),
        worker_id=command.worker_id,
        action=command.action,
        model=command.model,
        source=command.source,
        state=standing if is_open else str(command.state),
        refusal=command.refusal,
        outcome=command.outcome,
        models_before=command.models_before,
        models_after=command.models_after,
        asked_by=command.asked_by,
        created_at=command.created_at,
        ended_at=command.ended_at,
    )


def _json(body: Any, *, status: int = 200) -> HttpResponse:
    response = HttpResponse(msgspec.json.encode(body), content_type="application/json", status=status)
    response.headers["Cache-Control"] = "no-store"
    return response
