"""The console's pages about projects: what keys are grouped by, and what each used."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from inference.selectors import month_by_project
from tenants.client_address import client_address
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.models import Project
from tenants.selectors import ProjectNotFound, get_project, projects_with_keys
from tenants.services import Actor, create_project, delete_project, rename_project


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def projects(request: HttpRequest, console: Console) -> HttpResponse:
    """All of them with this month's use; a POST makes one."""
    name, refusal = request.POST.get("name", ""), ""
    if request.method == "POST":
        if not console.may_manage_keys:
            raise PermissionDenied
        try:
            made = create_project(actor=_actor(request, console), tenant=console.tenant, name=name)
        except ValidationError as error:
            refusal = " ".join(error.messages)
        else:
            messages.success(request, f"“{made.name}” is made. Keys can be given to it.")
            return redirect("projects", console.tenant.public_id)
    used = month_by_project(console.tenant)
    context = {
        "console": console,
        "section": "projects",
        "projects": [(row, used.get(row.public_id)) for row in projects_with_keys(console.tenant)],
        "none": used.get(None),
        "name": name,
        "refusal": refusal,
    }
    return render(request, "inference/projects.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def project(request: HttpRequest, console: Console, project_id: UUID) -> HttpResponse:
    """Renames or deletes it: `verb` says which."""
    if not console.may_manage_keys:
        raise PermissionDenied
    try:
        row = get_project(console.principal(), str(project_id))
    except ProjectNotFound:
        raise Http404 from None
    if request.method != "POST" and request.GET.get("verb") == "delete":
        question = Question(
            f"Delete “{row.name}”?",
            "No key belongs to it. This cannot be undone.",
            "Delete project",
            fields={"verb": "delete"},
        )
        back = reverse("projects", args=[console.tenant.public_id])
        return ask_first(request, console, question, section="projects", back=back)
    if request.method != "POST":
        has_keys = row.api_keys.exists()
        context = {"console": console, "section": "projects", "project": row, "has_keys": has_keys}
        in_dialog = "HX-Request" in request.headers
        template = "inference/project_form.html" if in_dialog else "inference/project.html"
        return render(request, template, context)
    actor = _actor(request, console)
    try:
        if request.POST.get("verb") == "delete":
            delete_project(actor=actor, project=row)
            messages.success(request, f"“{row.name}” is deleted.")
        elif rename_project(actor=actor, project=row, name=request.POST.get("name", "")):
            messages.success(request, "It is renamed.")
    except Project.DoesNotExist:  # it was deleted at this moment
        raise Http404 from None
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    return redirect("projects", console.tenant.public_id)


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
