"""A copy of a tenant's data: asked for by an owner, written by a task, kept for a week. The row is the job."""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import Q

from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class DataCopyState(models.TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class DataCopy(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="data_copies")
    state = models.CharField(max_length=8, choices=DataCopyState, default=DataCopyState.QUEUED)
    requested_by = models.CharField(max_length=254)
    attempts = models.PositiveSmallIntegerField(default=0)
    rows = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        verbose_name_plural = "data copies"
        ordering = ["-id"]
        indexes = [
            # A tenant's copies, newest first.
            models.Index(fields=["tenant", "-id"], name="data_copy_by_tenant"),
            # What still has to be written.
            models.Index(
                fields=["id"], condition=Q(state__in=["queued", "running"]), name="data_copy_to_write"
            ),
        ]
        constraints = [
            # Of those that wait; a second asking finds the first.
            models.UniqueConstraint(
                fields=["tenant"],
                condition=Q(state__in=["queued", "running"]),
                name="data_copy_one_at_a_time",
            ),
            models.CheckConstraint(
                condition=Q(state__in=DataCopyState.values), name="data_copy_state_is_known"
            ),
        ]

    def __str__(self) -> str:
        return f"copy of {self.tenant}, {self.state}"


class DataCopyFile(models.Model):
    """The ZIP: in the database, for gateways and tasks may run on hosts that share no disk."""

    copy = models.OneToOneField(DataCopy, primary_key=True, on_delete=models.CASCADE, related_name="file")
    content = models.BinaryField()

    def __str__(self) -> str:
        return str(self.copy)
