"""Pages that anybody may see: the start page and the API docs."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from inference.fleet import served_models

_EXAMPLE_MODEL = "smollm2"
"""Named in examples while no worker is there to name a real one."""


def api_example(request: HttpRequest) -> dict[str, Any]:
    """What a copied command needs to work against this very installation."""
    models = served_models()
    return {
        "base_url": request.build_absolute_uri("/v1"),
        "example_model": models[0].name if models else _EXAMPLE_MODEL,
    }


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    return render(request, "tenants/landing.html", api_example(request))


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    return render(request, "inference/docs.html", {"docs_shell": "public.html", **api_example(request)})
