"""What an operator told a worker process to serve, and what became of it."""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import Q


class CommandAction(models.TextChoices):
    LOAD = "load"
    UNLOAD = "unload"


class CommandState(models.TextChoices):
    OPEN = "open"
    DONE = "done"
    REFUSED = "refused"
    LOST = "lost"
    """Its process ended, or never took it."""


class WorkerCommand(models.Model):
    """Load a model, or unload one. `open` until the process has answered, or can't any more."""

    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    worker_id = models.CharField(max_length=200)
    action = models.CharField(max_length=10, choices=CommandAction.choices)
    model = models.CharField("name for clients", max_length=200)
    source = models.CharField("where it is, on the worker's machine", max_length=1000, blank=True)
    state = models.CharField(max_length=10, choices=CommandState.choices, default=CommandState.OPEN)
    refusal = models.CharField(max_length=40, blank=True)
    """broker/commands.py's Refusal."""
    outcome = models.TextField(blank=True)
    """Why it was not done."""
    models_before = models.JSONField(default=list, blank=True)
    models_after = models.JSONField(null=True, blank=True)
    asked_by = models.CharField(max_length=254)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=~Q(worker_id="") & ~Q(model=""), name="worker_command_names_worker_and_model"
            ),
            models.CheckConstraint(
                condition=Q(action="load") ^ Q(source=""), name="worker_command_loads_from_somewhere"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["open", "done", "refused", "lost"]),
                name="worker_command_state_is_known",
            ),
            models.CheckConstraint(
                condition=Q(state="open") ^ Q(ended_at__isnull=False), name="worker_command_ends_once"
            ),
            # Also finds the open ones: the timetable looks for them.
            models.UniqueConstraint(
                fields=["worker_id", "model"], condition=Q(state="open"), name="worker_command_one_at_a_time"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.model} on {self.worker_id}"
