"""The chat's conversations: each belongs to one person at one tenant, and nobody else reads it.

A conversation is a tree of exchanges. To try again or to ask otherwise adds a sibling and loses nothing; answers
of two models to one question are siblings with the same `pair`.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class Conversation(models.Model):
    public_id = models.UUIDField(unique=True, editable=False)
    """Made by the browser: what is written there has a name before the server hears of it."""
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="conversations", db_index=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="conversations")
    title = models.CharField(max_length=120)
    leaf_public_id = models.UUIDField(null=True)
    """The end of the branch that was looked at last."""
    settings = models.JSONField(null=True)
    """Model, tier, system prompt and sampling, as they were set last; null before any were kept."""
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-updated_at", "-id"]
        indexes = [
            # A person's list, newest first.
            models.Index(fields=["tenant", "user", "-updated_at", "-id"], name="conversation_by_person"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(title=""), name="conversation_has_a_title"),
        ]

    def __str__(self) -> str:
        return str(self.public_id)


class Exchange(models.Model):
    """One question and its answer."""

    public_id = models.UUIDField(editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+", db_index=False)
    conversation = models.ForeignKey(Conversation, on_delete=models.CASCADE, related_name="exchanges")
    parent_public_id = models.UUIDField(null=True)
    """The exchange before it; null at the beginning."""
    pair = models.UUIDField(null=True)
    """Common to the answers that are shown side by side."""
    question = models.TextField()
    answer = models.JSONField()
    """As the chat page keeps it (templates/static/weir/chat/generation.js): model, text, request, figures."""
    created_at = models.DateTimeField(db_default=Now())

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["id"]
        constraints = [
            # Found by the page's saving, which may happen twice; a conversation is read by it too.
            models.UniqueConstraint(
                fields=["tenant", "conversation", "public_id"], name="exchange_once_in_conversation"
            ),
        ]

    def __str__(self) -> str:
        return str(self.public_id)
