"""Files that tenants upload, batches that run over them, and one row per line that has ended."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class StoredFile(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="files")
    file_id = models.CharField(max_length=64, unique=True)
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=32)
    num_bytes = models.PositiveBigIntegerField()
    content = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's list, newest first.
            models.Index(fields=["tenant", "-id"], name="file_by_tenant"),
            # What the daily sweep deletes.
            models.Index(fields=["expires_at"], name="file_by_expiry"),
        ]
        constraints = [models.CheckConstraint(condition=~Q(file_id=""), name="file_has_an_id")]

    def __str__(self) -> str:
        return self.file_id


class BatchStatus(models.TextChoices):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN: frozenset[str] = frozenset(
    (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
)


class Batch(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="batches")
    batch_id = models.CharField(max_length=64, unique=True)
    key_public_id = models.UUIDField(null=True)
    """Whose limits hold and whose usage it is: as good as the key is when a line runs."""
    input_file_id = models.CharField(max_length=64)
    output_file_id = models.CharField(max_length=64, blank=True)
    error_file_id = models.CharField(max_length=64, blank=True)
    endpoint = models.CharField(max_length=64)
    status = models.CharField(max_length=16, choices=BatchStatus.choices, default=BatchStatus.VALIDATING)
    metadata = models.BinaryField(default=b"{}")
    """JSON, as the two below."""
    errors = models.BinaryField(default=b"[]")
    """Why it failed."""
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's list, newest first.
            models.Index(fields=["tenant", "-id"], name="batch_by_tenant"),
            # What the runner goes on with.
            models.Index(fields=["id"], condition=Q(ended_at__isnull=True), name="batch_open"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(batch_id=""), name="batch_has_an_id"),
            models.CheckConstraint(condition=Q(status__in=BatchStatus.values), name="batch_status_is_known"),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, status__in=sorted(OPEN))
                | (Q(ended_at__isnull=False) & ~Q(status__in=sorted(OPEN))),
                name="batch_has_ended_or_is_open",
            ),
            models.CheckConstraint(
                condition=Q(total__gte=F("completed") + F("failed")), name="batch_counts_add_up"
            ),
        ]

    def __str__(self) -> str:
        return self.batch_id


class BatchResult(models.Model):
    """A line that has ended. Unique, so that no line is told twice, however often the runner dies."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="batch_results")
    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="results")
    line = models.PositiveIntegerField()
    is_error = models.BooleanField()
    body = models.BinaryField()
    """The line of the output file, or of the error file."""

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["line"]
        constraints = [models.UniqueConstraint(fields=["batch", "line"], name="batch_line_ends_once")]

    def __str__(self) -> str:
        return f"{self.batch_id}:{self.line}"
