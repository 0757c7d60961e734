"""The operator's live page: workers, queues, the dead. A person's view of what operator_api gives as JSON."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, cast
from uuid import UUID

from asgiref.sync import async_to_sync
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from engine_worker.broker import BrokerUnavailable, OperatorBroker, UnknownRequest
from engine_worker.broker.commands import ProcessStatus
from engine_worker.protocol import Rung, StartStage
from inference.models import CommandAction, CommandState, WorkerCommand
from inference.operator_api import read_live_state
from inference.schemas.operator import LiveState
from tenants.admin.base import actor_of
from tenants.admin.confirmation import ask_operator
from tenants.confirmation import Question
from tenants.models import Tenant, Tier, User
from tenants.services import record_audit

_COMMANDS_SHOWN: Final = 8
_RUNGS: dict[Rung, str] = {
    rung: rung.name.replace("_", " ").lower() for rung in Rung if rung is not Rung.NONE
}


@never_cache
@require_safe
def live_page(request: HttpRequest) -> HttpResponse:
    """As it is now; from then on it is kept fresh by `/ws/live`."""
    state = None
    with suppress(BrokerUnavailable):  # the page says so
        state = async_to_sync(read_live_state)()
    context = live_context(cast(User, request.user), state)
    return render(
        request, "admin/live.html", {**admin.site.each_context(request), "title": "Live", **context}
    )


def live_context(user: User, state: LiveState | None) -> dict[str, Any]:
    """Of the page and of its part. Three queries."""
    return {"may_act": user.is_superuser, "state": None if state is None else _named(state)}


@require_http_methods(["GET", "HEAD", "POST"])
def dead_letter(request: HttpRequest) -> HttpResponse:
    """Queues a dead request again, or lets it go: that is asked first."""
    if not request.user.is_superuser:
        raise PermissionDenied
    # In the address of each button: one form, with one token, stands beside a part that comes anew all the time.
    asked = request.GET
    verb = asked.get("verb", "")
    model, request_id = asked.get("model", ""), asked.get("request_id", "")
    tenant = _tenant_or_none(asked.get("tenant", ""))
    if verb not in ("requeue", "drop") or tenant is None:
        raise Http404
    if request.method != "POST":
        if verb != "drop":
            raise Http404
        question = Question(
            f"Drop {request_id}?",
            f"A request of {tenant.name} for {model}. It and the tokens it made are gone at once, and it cannot be "
            "queued again. What was charged stays charged.",
            "Drop it",
        )
        return ask_operator(request, question, back=reverse("admin_live"))
    try:
        with transaction.atomic():
            done = async_to_sync(_act)(verb, model, request_id, str(tenant.public_id))
            if done:
                record_audit(
                    actor=actor_of(request),
                    action=f"dead_letter.{verb}",
                    tenant=tenant,
                    target=tenant,
                    after={"model": model, "request_id": request_id},
                )
    except UnknownRequest:
        messages.error(request, f"{request_id} is unknown, or its day is over.")
    except BrokerUnavailable:
        messages.error(request, "The queue can't be reached; nothing was changed.")
    else:
        words = {"requeue": "is queued again", "drop": "is dropped"}[verb] if done else "is not dead"
        messages.info(request, f"{request_id} {words}.")
    return redirect("admin_live")


async def _act(verb: str, model: str, request_id: str, tenant_id: str) -> bool:
    operator = OperatorBroker(settings.REDIS_URL)
    try:
        letters = await operator.dead_letters(model, limit=10_000)
        letter = next((letter for letter in letters if letter.request_id == request_id), None)
        if letter is None:
            return False
        if letter.tenant_id != tenant_id:
            raise UnknownRequest(request_id)
        return await (operator.requeue if verb == "requeue" else operator.drop)(model, request_id)
    finally:
        await operator.aclose()


def _tenant_or_none(public_id: str) -> Tenant | None:
    try:
        return Tenant.objects.filter(public_id=UUID(public_id)).first()
    except ValueError:
        return None


def _named(state: LiveState) -> dict[str, Any]:
    """With the names of tiers and tenants, and times that a template can write. Three queries."""
    queues = state["models"]
    dead = state["dead_letters"]
    ids = {line.tenant_id for queue in queues for tier in queue.tiers for line in tier.tenants}
    ids |= {letter.tenant_id for letter in dead}
    known = {public_id for text in ids if (public_id := _uuid_or_none(text))}
    tenants = {str(row.public_id): row for row in Tenant.objects.filter(public_id__in=known)}
    tiers = dict(Tier.objects.values_list("rank", "name"))
    served = {worker.model for worker in state["workers"]}
    return {
        "workers": [
            {
                "status": worker,
                "rung": _RUNGS.get(Rung(worker.rung), ""),
                "updated_at": datetime.fromtimestamp(worker.updated_at_ms / 1000, tz=UTC),
            }
            for worker in state["workers"]
        ],
        "starting": [
            {"status": each, "for_ms": each.for_s * 1000, "compiles": each.stage == StartStage.COMPILING}
            for each in state["starting"]
        ],
        "processes": state["processes"],
        "commands": _commands(state["processes"]),
        "queues": [
            {
                "queue": queue,
                "is_served": queue.model in served,
                "tiers": [
                    {
                        "tier": tier,
                        "name": tiers.get(tier.rank, f"rank {tier.rank}"),
                        "lines": [
                            {"line": line, "tenant": tenants.get(line.tenant_id)} for line in tier.tenants
                        ],
                    }
                    for tier in queue.tiers
                ],
            }
            for queue in queues
            if queue.model in served or not queue.is_idle
        ],
        "dead": [
            {
                "letter": letter,
                "tenant": tenants.get(letter.tenant_id),
                "died_at": datetime.fromtimestamp(letter.died_at_ms / 1000, tz=UTC),
            }
            for letter in dead
        ],
    }


def _commands(processes: list[ProcessStatus]) -> list[dict[str, Any]]:
    """The last ones, and how each stands."""
    at_work = {process.command_id for process in processes}
    return [
        {"row": row, "standing": _standing(row, at_work)}
        for row in WorkerCommand.objects.order_by("-id")[:_COMMANDS_SHOWN]
    ]


def _standing(row: WorkerCommand, at_work: set[str]) -> str:
    if row.state != CommandState.OPEN:
        done = {CommandAction.LOAD: "loaded", CommandAction.UNLOAD: "unloaded"}[CommandAction(row.action)]
        return done if row.state == CommandState.DONE else str(row.state)
    if str(row.public_id) not in at_work:
        return "waiting"
    return {CommandAction.LOAD: "loading", CommandAction.UNLOAD: "draining"}[CommandAction(row.action)]


def _uuid_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
