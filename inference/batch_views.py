"""The console's pages about batch jobs: how far they are, their files, stopping and starting one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from inference.batch_list import batches_context
from inference.downloads import download
from inference.errors import ApiError, NotFound
from inference.schemas.batches import BatchRequest
from inference.services.batches import cancel_batch, create_batch, find_batch
from inference.services.files import find_file, upload_file
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.models import ApiKey
from tenants.selectors import ApiKeyNotFound, get_api_key, keys_for_batches


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def batch_list(request: HttpRequest, console: Console) -> HttpResponse:
    """All of them, newest first; a POST uploads a file of lines and starts one."""
    if request.method == "POST":
        return _start(request, console)
    before = request.GET.get("before", "").replace("\0", "")[:64]
    context: dict[str, Any] = {
        "section": "batches",
        "keys": keys_for_batches(console.tenant) if console.may_chat else [],
        **batches_context(console, before=before),
    }
    return render(request, "inference/batches.html", context)


def _start(request: HttpRequest, console: Console) -> HttpResponse:
    if not console.may_chat:
        raise PermissionDenied
    upload = request.FILES.get("file")
    api_key = _key(console, request.POST.get("key", ""))
    if upload is None or isinstance(upload, list) or api_key is None:
        messages.error(request, "Choose a file of lines and the key whose limits hold.")
        return redirect("batches", console.tenant.public_id)
    principal = replace(console.principal(), key_public_id=str(api_key.public_id))
    try:
        file = upload_file(
            principal, filename=upload.name or "file", content=upload.read(), expires_after_s=None
        )
        create_batch(
            principal,
            BatchRequest(
                input_file_id=file.file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        )
        messages.success(request, "It is checked now, then its lines run one after another.")
    except ApiError as error:
        messages.error(request, error.message)
    return redirect("batches", console.tenant.public_id)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def cancel(request: HttpRequest, console: Console, batch_id: str) -> HttpResponse:
    """Asks first, then cancels."""
    if not console.may_chat:
        raise PermissionDenied
    if request.method != "POST":
        try:
            batch = find_batch(console.principal(), batch_id)
        except NotFound:
            raise Http404 from None
        question = Question(
            f"Cancel batch {batch.batch_id}?",
            "Lines that have not ended are not run any more. What has ended is charged and can be fetched. "
            "This cannot be undone.",
            "Cancel the batch",
            keep="Let it run",
        )
        back = reverse("batches", args=[console.tenant.public_id])
        return ask_first(request, console, question, section="batches", back=back)
    try:
        cancel_batch(console.principal(), batch_id)
        messages.success(request, "It is being cancelled. What has ended by then can be fetched.")
    except NotFound:
        raise Http404 from None
    except ApiError as error:
        messages.error(request, error.message)
    return redirect("batches", console.tenant.public_id)


@require_safe
@tenant_page
def batch_file(request: HttpRequest, console: Console, file_id: str) -> HttpResponse:
    """Prompts and answers: for those who may generate, as under /v1/files."""
    if not console.may_chat:
        raise PermissionDenied
    try:
        file = find_file(console.principal(), file_id)
    except NotFound:
        raise Http404 from None
    return download(bytes(file.content), f"{file.file_id}.jsonl", "application/jsonl")


def _key(console: Console, public_id: str) -> ApiKey | None:
    try:
        return get_api_key(console.principal(), str(UUID(public_id)))
    except (ApiKeyNotFound, ValueError):
        return None
