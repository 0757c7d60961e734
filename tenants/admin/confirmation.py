"""The operator's share of tenants/confirmation.py: an action on chosen rows asks first, on a page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from tenants.confirmation import Question

CONFIRMED = "confirmed"
"""What the question's form sends along."""


def ask_operator(
    request: HttpRequest,
    question: Question,
    *,
    back: str,
    of: list[str] | None = None,
    chosen: Mapping[str, list[str]] | None = None,
    reason: str = "",
) -> HttpResponse:
    """The question as a page of the admin. `of` names what it is about; `reason` is the label of a field for one."""
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": question.title,
        "question": question,
        "back": back,
        "of": of or [],
        "chosen": chosen or {},
        "reason": reason,
    }
    return render(request, "admin/confirm.html", context)


def ask_about_rows(
    request: HttpRequest, action: str, rows: list[Any], question: Question, *, reason: str = ""
) -> HttpResponse | None:
    """For an action of a list: None once it is confirmed."""
    if CONFIRMED in request.POST:
        return None
    chosen = {
        "action": [action],
        CONFIRMED: ["1"],
        "select_across": [request.POST.get("select_across", "0")],
        ACTION_CHECKBOX_NAME: request.POST.getlist(ACTION_CHECKBOX_NAME),
    }
    back = request.get_full_path()
    return ask_operator(
        request, question, back=back, of=[str(row) for row in rows[:50]], chosen=chosen, reason=reason
    )
