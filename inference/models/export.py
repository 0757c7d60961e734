"""A report as a file: asked for, written by a task, kept for a week.

The row is the job: the task looks for rows that wait, so that no message can be lost between the two. The file
lies in the database, for gateways and tasks may run on hosts that share no disk; it goes when its row goes.
"""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class ExportFormat(models.TextChoices):
    CSV = "csv"
    XLSX = "xlsx"


class ExportState(models.TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class UsageExport(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="usage_exports")
    format = models.CharField(max_length=8, choices=ExportFormat)
    state = models.CharField(max_length=8, choices=ExportState, default=ExportState.QUEUED)
    asked = models.JSONField()
    """since, until, width, group_by, filters: those of reports.Report."""
    requested_by = models.CharField(max_length=254)
    """The e-mail, or the key's prefix."""
    attempts = models.PositiveSmallIntegerField(default=0)
    error = models.CharField(max_length=200, blank=True)
    """Why it failed, for those who asked."""
    rows = models.PositiveIntegerField(default=0)
    total_microusd = models.BigIntegerField(default=0)
    """The sum of the file's last column of money."""
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's exports, newest first.
            models.Index(fields=["tenant", "-id"], name="export_by_tenant"),
            # What still has to be written.
            models.Index(fields=["id"], condition=Q(state__in=["queued", "running"]), name="export_to_write"),
            # What has expired.
            models.Index(fields=["expires_at"], name="export_by_expiry"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(format__in=ExportFormat.values), name="export_format_is_known"
            ),
            models.CheckConstraint(condition=Q(state__in=ExportState.values), name="export_state_is_known"),
            models.CheckConstraint(
                condition=Q(state="queued") | Q(started_at__isnull=False), name="export_begins_before_it_ends"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["done", "failed"], finished_at__isnull=False)
                | Q(state__in=["queued", "running"], finished_at__isnull=True),
                name="export_ends_once",
            ),
        ]

    def __str__(self) -> str:
        return f"usage as {self.format}, {self.created_at:%Y-%m-%d %H:%M}"

    @property
    def file_name(self) -> str:
        return f"usage-{self.asked['since'][:10]}-to-{self.asked['until'][:10]}.{self.format}"


class ExportFile(models.Model):
    export = models.OneToOneField(
        UsageExport, primary_key=True, on_delete=models.CASCADE, related_name="file"
    )
    content = models.BinaryField()

    def __str__(self) -> str:
        return f"file of {self.export_id}"
