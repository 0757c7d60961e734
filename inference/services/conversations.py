"""A person's conversations with the chat: save, rename, delete. Not audited: what people ask is their own."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from django.db import IntegrityError, transaction
from django.utils import timezone

from inference.errors import InvalidRequest, NotFound
from inference.models import Conversation, Exchange
from inference.schemas.conversations import TITLE_MAX, ChangeConversation, SaveExchange, without_nul
from tenants.models import Tenant, User

EXCHANGES_MAX = 2000
"""In one conversation: what a page can still show, and a bound on what one person can store in it."""
CONVERSATIONS_MAX = 5000
"""Of one person at one tenant."""


def save_exchange(
    *, tenant: Tenant, user: User, conversation_id: UUID, exchange_id: UUID, saved: SaveExchange
) -> None:
    """Makes the conversation with its first exchange; saved again, an exchange is overwritten.

    Raises NotFound where the conversation is another's, InvalidRequest where it is full.
    """
    with transaction.atomic():
        conversation = _own_or_new(tenant, user, conversation_id, saved.title)
        others = Exchange.objects.filter(tenant=tenant, conversation=conversation)
        if others.exclude(public_id=exchange_id).count() >= EXCHANGES_MAX:
            raise InvalidRequest(f"A conversation holds at most {EXCHANGES_MAX} exchanges: begin a new one.")
        Exchange.objects.filter(tenant=tenant).update_or_create(
            tenant=tenant,
            conversation=conversation,
            public_id=exchange_id,
            defaults={
                "parent_public_id": saved.parent,
                "pair": saved.pair,
                "question": without_nul(saved.question),
                "answer": _plain(saved.answer),
            },
        )
        fields = {} if saved.settings is None else {"settings": _plain(saved.settings)}
        Conversation.objects.filter(tenant=tenant, pk=conversation.pk).update(
            updated_at=timezone.now(), leaf_public_id=saved.leaf or exchange_id, **fields
        )


def change_conversation(
    *, tenant: Tenant, user: User, conversation_id: UUID, change: ChangeConversation
) -> None:
    """Raises NotFound."""
    fields: dict[str, object] = {}
    if change.title is not msgspec.UNSET:
        fields["title"] = _title(change.title)
    if change.leaf is not msgspec.UNSET:
        fields["leaf_public_id"] = change.leaf
    if change.settings is not msgspec.UNSET:
        fields["settings"] = _plain(change.settings)
    rows = Conversation.objects.filter(tenant=tenant, user=user, public_id=conversation_id)
    if not (rows.update(**fields) if fields else rows.exists()):
        raise _absent()


def delete_conversation(*, tenant: Tenant, user: User, conversation_id: UUID) -> None:
    """With all that was said in it. Raises NotFound."""
    deleted, _ = Conversation.objects.filter(tenant=tenant, user=user, public_id=conversation_id).delete()
    if not deleted:
        raise _absent()


def _own_or_new(tenant: Tenant, user: User, public_id: UUID, title: str) -> Conversation:
    own = Conversation.objects.filter(tenant=tenant, user=user)
    # Locked: two exchanges of a comparison are saved at once, and both may be the first.
    found = own.select_for_update().filter(public_id=public_id).first()
    if found is not None:
        return found
    if own.count() >= CONVERSATIONS_MAX:
        raise InvalidRequest(f"You keep {CONVERSATIONS_MAX} conversations here: delete some.")
    try:
        with transaction.atomic():
            return Conversation.objects.create(
                tenant=tenant, user=user, public_id=public_id, title=_title(title)
            )
    except IntegrityError:
        found = own.select_for_update().filter(public_id=public_id).first()
        if found is None:
            raise _absent() from None  # the id is another person's: to this one it does not exist
        return found


def _plain(given: msgspec.Struct) -> Any:
    return without_nul(msgspec.to_builtins(given))


def _title(given: str) -> str:
    words = " ".join(without_nul(given).split())
    return words[:TITLE_MAX] or "New chat"


def _absent() -> NotFound:
    return NotFound(
        "There is no such conversation: it was deleted, or is another's. Begin a new one.",
        code="conversation_not_found",
    )
