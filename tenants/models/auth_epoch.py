"""One row that changes whenever a key, tenant, tier or limit does.

Gateways cache principals. Before they trust one, they know this value to be at most half a second
old, so a revocation empties every cache in time. Triggers write it (migration 0003), in the very
transaction that makes the change: nobody can forget to, raw SQL included, and no gateway sees the
new value before the new row. That is also why it lives here and not in Redis.
"""

from __future__ import annotations

from django.db import models


class AuthEpoch(models.Model):
    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    value = models.UUIDField()
    """Random: never repeats, not even after a restore from a backup."""

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="auth_epoch_is_one_row")]

    def __str__(self) -> str:
        return str(self.value)
