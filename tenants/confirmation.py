"""What can't be taken back asks first: a page, or a dialog where htmx asks for it. One way for the whole console.

A link leads to the question by GET; its form posts to the same address. Without JavaScript it is a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from tenants.console import Console


@dataclass(frozen=True, slots=True)
class Question:
    title: str
    text: str
    """What will be so afterwards, and whether it can be undone."""
    verb: str
    """On the button that does it."""
    keep: str = "Keep it"
    """On the other."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the form sends along."""


def ask_first(
    request: HttpRequest, console: Console, question: Question, *, section: str, back: str
) -> HttpResponse:
    """The question. `back` is where who keeps it goes."""
    in_dialog = "HX-Request" in request.headers
    template = "confirm_form.html" if in_dialog else "confirm.html"
    context = {"console": console, "section": section, "question": question, "back": back}
    return render(request, template, context)
