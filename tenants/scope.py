"""The only door to tenant-owned rows.

Each tenant-owned model has two managers. `objects` refuses any query that does not name its tenant,
so a forgotten filter is an exception in the first test instead of a leak. `unscoped` sees every row;
`tests/test_architecture.py` lists the few files that may use it, each with its reason. It is also
Django's default manager, because the admin, migrations and cascades work across tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models
from django.db.models.query import QuerySet

if TYPE_CHECKING:
    from tenants.models.tenant import Tenant

_Row = TypeVar("_Row", bound=models.Model)


class UnscopedQuery(Exception):
    """A query on tenant-owned rows named no tenant."""


class TenantScopedManager(models.Manager[_Row]):
    """Gives only the rows of a named tenant."""

    def for_tenant(self, tenant: Tenant | int) -> QuerySet[_Row]:
        """The rows of one tenant, given as a row or by its private id."""
        tenant_id = tenant if isinstance(tenant, int) else tenant.pk
        if tenant_id is None:
            # A None would mean the rows without a tenant: the operator's own.
            raise UnscopedQuery(f"{self.model.__name__}: the tenant has not been saved")
        return super().get_queryset().filter(tenant_id=tenant_id)

    def get_queryset(self) -> QuerySet[_Row]:
        raise UnscopedQuery(
            f"{self.model.__name__}.objects needs a tenant: for_tenant(...), or filter, get or create "
            "with tenant=..."
        )

    def filter(self, *args: Any, **kwargs: Any) -> QuerySet[_Row]:
        return self._named(kwargs).filter(*args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> _Row:
        return self._named(kwargs).get(*args, **kwargs)

    def create(self, **kwargs: Any) -> _Row:
        return self._named(kwargs).create(**kwargs)

    def get_or_create(self, defaults: Mapping[str, Any] | None = None, **kwargs: Any) -> tuple[_Row, bool]:
        # The scope's filter must not reach the INSERT: the arguments that name the tenant do.
        self._named(kwargs)
        return super().get_queryset().get_or_create(defaults, **kwargs)

    def bulk_create(self, objs: Iterable[_Row], *args: Any, **kwargs: Any) -> list[_Row]:
        rows = list(objs)
        for row in rows:
            self._named({"tenant_id": getattr(row, "tenant_id", None)})
        return super().get_queryset().bulk_create(rows, *args, **kwargs)

    def _named(self, kwargs: MutableMapping[str, Any]) -> QuerySet[_Row]:
        tenant = kwargs.get("tenant", kwargs.get("tenant_id"))
        if tenant is None:
            return self.get_queryset()
        return self.for_tenant(tenant)


__all__ = ["TenantScopedManager", "UnscopedQuery"]
