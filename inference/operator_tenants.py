"""The operator's list of tenants: what each used, what it may use, and what of that is left, on one page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.conf import settings
from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inference.selectors import Totals, today_and_this_month
from tenants.models import Tenant
from tenants.principal import Principal
from tenants.principal_selectors import tenant_principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.gauges import Gauge, forecast
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import BucketState
from tenants.selectors import with_people_and_keys

_PAGE: Final = 25
_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    tenant: Any
    """With `live_keys` and `people`."""
    today: Totals
    month: Totals
    limits: list[Gauge] | None
    """None: Redis can't say."""

    @property
    def tightest(self) -> Gauge | None:
        return next((gauge for gauge in self.limits or () if gauge.binds), None)


@never_cache
@require_safe
def tenants_page(request: HttpRequest) -> HttpResponse:
    search = request.GET.get("q", "").replace("\0", "")[:120].strip()
    rows = Tenant.objects.select_related("tier").order_by("name", "id")
    if search:
        rows = rows.filter(Q(name__icontains=search) | Q(slug__icontains=search))
    page = Paginator(rows, _PAGE).get_page(request.GET.get("page"))
    shown = list(page.object_list)
    counts = with_people_and_keys(Tenant.objects.filter(pk__in=[tenant.pk for tenant in shown]))
    counted = {row.pk: row for row in counts.select_related("tier")}
    left = _limits_left([tenant_principal(tenant) for tenant in shown])
    context = {
        **admin.site.each_context(request),
        "title": "Tenants: usage and limits",
        "page": page,
        "search": search,
        "rows": [
            Row(
                counted[tenant.pk],
                *today_and_this_month(tenant),
                None if left is None else forecast(left[index], tenant),
            )
            for index, tenant in enumerate(shown)
        ],
    }
    return render(request, "admin/tenants_page.html", context)


def _limits_left(principals: list[Principal]) -> list[tuple[BucketState, ...]] | None:
    try:
        return async_to_sync(_peek_all)(principals)
    except QuotaUnavailable:
        return None


async def _peek_all(principals: list[Principal]) -> list[tuple[BucketState, ...]]:
    store = QuotaStore(settings.REDIS_URL, timeout_s=_TIMEOUT_S, max_connections=_PAGE)
    try:
        return list(await asyncio.gather(*(store.peek(principal) for principal in principals)))
    finally:
        await store.aclose()
