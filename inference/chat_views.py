"""The chat page, and the JSON that it keeps its conversations by. A person's own, at one of their tenants."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, cast
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from inference import conversations
from inference.api.error_shapes import render_error
from inference.errors import ApiError
from inference.fleet import chat_models
from inference.schemas.conversations import ChangeConversation, SaveExchange
from inference.schemas.reading import read_json
from inference.services.conversations import change_conversation, delete_conversation, save_exchange
from tenants.console import Console, last_console, tenant_page
from tenants.principal_selectors import tiers_open_to

_DEFAULT_MAX_TOKENS = 512
_SEARCH_CHARS_MAX = 200
_P = ParamSpec("_P")


def _answers_errors(
    view: Callable[Concatenate[HttpRequest, Console, _P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, Console, _P], HttpResponse]:
    @wraps(view)
    def answering(
        request: HttpRequest, console: Console, *args: _P.args, **kwargs: _P.kwargs
    ) -> HttpResponse:
        try:
            return view(request, console, *args, **kwargs)
        except ApiError as error:
            return render_error(request, error)

    return cast(Callable[Concatenate[HttpRequest, Console, _P], HttpResponse], answering)


@require_safe
@login_required
def chat_home(request: HttpRequest) -> HttpResponse:
    """An address to remember: the chat of the tenant that the member looked at last."""
    console = last_console(request)
    return redirect("home") if console is None else redirect("chat", console.tenant.public_id)


@require_safe
@tenant_page
def chat(request: HttpRequest, console: Console) -> HttpResponse:
    longest = console.tenant.tier.max_output_tokens
    context = {
        "console": console,
        "section": "chat",
        "models": chat_models(console.tenant) if console.may_chat else (),
        "tiers": tiers_open_to(console.tenant),
        "max_output_tokens": longest,
        "default_max_tokens": min(_DEFAULT_MAX_TOKENS, longest),
        "socket_path": "/ws/chat",
    }
    return render(request, "inference/chat.html", context)


@require_safe
@tenant_page
@_answers_errors
def conversation_list(request: HttpRequest, console: Console) -> HttpResponse:
    """`?q=` searches, `?offset=` pages: `{"conversations": [{id, title, updated_at}], "has_more"}`."""
    offset = request.GET.get("offset", "")
    page, has_more = conversations.list_conversations(
        console.tenant,
        console.user,
        search=request.GET.get("q", "").replace("\0", "")[:_SEARCH_CHARS_MAX].strip(),
        offset=int(offset) if offset.isdecimal() and len(offset) < 7 else 0,
    )
    return JsonResponse(
        {"conversations": [conversations.as_summary(row) for row in page], "has_more": has_more}
    )


@require_http_methods(["GET", "HEAD", "PATCH", "DELETE"])
@tenant_page
@_answers_errors
def conversation(request: HttpRequest, console: Console, conversation_id: UUID) -> HttpResponse:
    tenant, user = console.tenant, console.user
    if request.method == "PATCH":
        change = read_json(request.body, ChangeConversation)
        change_conversation(tenant=tenant, user=user, conversation_id=conversation_id, change=change)
        return HttpResponse(status=204)
    if request.method == "DELETE":
        delete_conversation(tenant=tenant, user=user, conversation_id=conversation_id)
        return HttpResponse(status=204)
    return JsonResponse(conversations.as_json(*conversations.get_conversation(tenant, user, conversation_id)))


@require_http_methods(["PUT"])
@tenant_page
@_answers_errors
def exchange(
    request: HttpRequest, console: Console, conversation_id: UUID, exchange_id: UUID
) -> HttpResponse:
    save_exchange(
        tenant=console.tenant,
        user=console.user,
        conversation_id=conversation_id,
        exchange_id=exchange_id,
        saved=read_json(request.body, SaveExchange),
    )
    return HttpResponse(status=204)


@require_safe
@tenant_page
@_answers_errors
def export(request: HttpRequest, console: Console, conversation_id: UUID, form: str) -> HttpResponse:
    """The whole tree as JSON, or the branch that was looked at last as Markdown: as a file."""
    row, exchanges = conversations.get_conversation(console.tenant, console.user, conversation_id)
    if form == "json":
        text = json.dumps(conversations.as_json(row, exchanges), ensure_ascii=False, indent=2)
        kind = "application/json"
    else:
        text, kind = conversations.as_markdown(row, exchanges), "text/markdown"
    # The title is a person's: it stays out of the header.
    name = f"chat-{row.created_at:%Y-%m-%d}-{row.public_id.hex[:8]}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(text, content_type=f"{kind}; charset=utf-8", headers=headers)
