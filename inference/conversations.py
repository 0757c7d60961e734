"""Reads of a person's conversations, and what they look like outside: JSON and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, Q

from inference.errors import NotFound
from inference.models import Conversation, Exchange
from tenants.models import Tenant, User

PAGE = 50


def list_conversations(
    tenant: Tenant, user: User, *, search: str = "", offset: int = 0
) -> tuple[list[Conversation], bool]:
    """One page, newest first, and whether more follow. `search` is looked for in titles, questions and answers."""
    rows = Conversation.objects.filter(tenant=tenant, user=user)
    if search:
        said = Exchange.objects.filter(tenant=tenant, conversation=OuterRef("pk")).filter(
            Q(question__icontains=search) | Q(answer__text__icontains=search)
        )
        rows = rows.filter(Q(title__icontains=search) | Exists(said))
    page = list(rows[offset : offset + PAGE + 1])
    return page[:PAGE], len(page) > PAGE


def get_conversation(tenant: Tenant, user: User, public_id: UUID) -> tuple[Conversation, list[Exchange]]:
    """With its exchanges, oldest first. Raises NotFound for an absent one as for another's."""
    row = Conversation.objects.filter(tenant=tenant, user=user, public_id=public_id).first()
    if row is None:
        raise NotFound(
            "There is no such conversation: it was deleted, or is another's. Begin a new one.",
            code="conversation_not_found",
        )
    return row, list(Exchange.objects.filter(tenant=tenant, conversation=row))


def as_summary(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": str(conversation.public_id),
        "title": conversation.title,
        "updated_at": conversation.updated_at.isoformat(),
    }


def as_json(conversation: Conversation, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    return {
        **as_summary(conversation),
        "created_at": conversation.created_at.isoformat(),
        "settings": conversation.settings,
        "leaf": conversation.leaf_public_id and conversation.leaf_public_id.hex,
        "exchanges": [
            {
                "id": exchange.public_id.hex,
                "parent": exchange.parent_public_id and exchange.parent_public_id.hex,
                "pair": exchange.pair and exchange.pair.hex,
                "question": exchange.question,
                "answer": exchange.answer,
                "created_at": exchange.created_at.isoformat(),
            }
            for exchange in exchanges
        ],
    }


def as_markdown(conversation: Conversation, exchanges: Sequence[Exchange]) -> str:
    """The branch that was looked at last, from its beginning."""
    by_id = {exchange.public_id: exchange for exchange in exchanges}
    path: list[Exchange] = []
    step = by_id.get(conversation.leaf_public_id) if conversation.leaf_public_id else None
    while step is not None and step not in path:
        path.append(step)
        step = by_id.get(step.parent_public_id) if step.parent_public_id else None
    parts = [f"# {conversation.title}", f"{conversation.created_at:%Y-%m-%d %H:%M} UTC"]
    if system := (conversation.settings or {}).get("system"):
        parts += ["## System prompt", system]
    for exchange in reversed(path):
        parts += ["## You", exchange.question, f"## {exchange.answer['model']}", exchange.answer["text"]]
    return "\n\n".join(parts) + "\n"
