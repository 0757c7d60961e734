"""The operator's pages that tell a worker process which models to serve. What became of it is on the live page."""

from __future__ import annotations

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from engine_worker.broker import BrokerUnavailable
from inference.models import CommandAction
from inference.services.worker_commands import CommandUnderway, WorkerGone, command_worker
from tenants.admin.base import actor_of
from tenants.admin.confirmation import ask_operator
from tenants.confirmation import Question


class LoadForm(forms.Form):
    model = forms.CharField(label="What clients call it", max_length=200)
    source = forms.CharField(label="Where it is, on the worker's machine", max_length=1000)


@require_http_methods(["GET", "HEAD", "POST"])
def load_form(request: HttpRequest) -> HttpResponse:
    worker = _worker(request)
    form = LoadForm(request.POST or None)
    if form.is_valid():
        try:
            return _commanded(request, worker, CommandAction.LOAD, **form.cleaned_data)
        except ValidationError as error:
            for name, texts in error.message_dict.items():
                form.add_error(name if name in form.fields else None, " ".join(texts))
    context = {
        **admin.site.each_context(request),
        "title": f"Load a model on {worker}",
        "form": form,
        "back": reverse("admin_live"),
    }
    return render(request, "admin/load_model.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
def unload(request: HttpRequest) -> HttpResponse:
    """That is asked first."""
    worker, model = _worker(request), request.GET.get("model", "")
    if request.method == "POST":
        try:
            return _commanded(request, worker, CommandAction.UNLOAD, model=model)
        except ValidationError as error:
            raise Http404 from error
    question = Question(
        f"Unload {model}?",
        f"{worker} takes nothing new for it, finishes what runs, and gives the rest back to the queue. Where no other "
        "worker serves the model, what waits for it is refused.",
        "Unload it",
    )
    return ask_operator(request, question, back=reverse("admin_live"))


def _worker(request: HttpRequest) -> str:
    if not request.user.is_superuser:
        raise PermissionDenied
    worker = request.GET.get("worker", "")
    if not worker or not worker.isprintable():
        raise Http404
    return worker


def _commanded(
    request: HttpRequest, worker: str, action: CommandAction, *, model: str, source: str = ""
) -> HttpResponse:
    """Raises ValidationError."""
    try:
        command = command_worker(
            actor=actor_of(request), worker_id=worker, action=action, model=model, source=source
        )
    except (WorkerGone, CommandUnderway) as error:
        messages.error(request, f"{error} Nothing was changed.")
    except BrokerUnavailable:
        messages.error(request, "The queue can't be reached; nothing was changed.")
    else:
        messages.info(request, f"Told: {command}. How it stands is below.")
    return redirect("admin_live")
