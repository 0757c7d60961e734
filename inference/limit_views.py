"""The console's pages about limits: what is left of each, what they refused, and what another one would have done."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from inference.limit_forms import LimitForm
from inference.replica import on_replica
from inference.request_log import keys_used, models_used
from inference.services.explain import recent_refusals
from inference.services.recall import recall_from_ledger
from inference.services.try_limit import DAYS_MAX, TooMuchTraffic, try_limit
from tenants.console import Console, tenant_page
from tenants.quotas.gauges import limit_gauges
from tenants.selectors import limits_of_keys
from tenants.services.limits import proposed_limit

_REFUSALS_SHOWN: Final = 20


@require_safe
@tenant_page
def limits(request: HttpRequest, console: Console) -> HttpResponse:
    """Every limit of the tenant with what is left of it, what was refused, and what tier and keys are bound to."""
    tenant, tier = console.tenant, console.tenant.tier
    context = {
        "console": console,
        "section": "limits",
        "limits": limit_gauges(console.principal(), tenant, recall_from_ledger),
        "key_limits": limits_of_keys(tenant),
        "refusals": recent_refusals(str(tenant.public_id))[:_REFUSALS_SHOWN],
        "max_wait_ms": 1000 * (tier.max_wait_s or tier.deadline_s),
        "deadline_ms": 1000 * tier.deadline_s,
        "weight": tenant.weight or tier.weight,
    }
    return render(request, "inference/limits.html", context)


@require_safe
@tenant_page
def try_out(request: HttpRequest, console: Console) -> HttpResponse:
    """A limit that is not set, played against the traffic of the last days. Asked by the address of the page."""
    if not console.may_administer:
        raise PermissionDenied
    tenant = console.tenant
    try:
        chosen = UUID(request.GET.get("key", ""))
    except ValueError:
        chosen = None
    names = dict(keys_used(tenant, days=DAYS_MAX, chosen=chosen))
    form = LimitForm(
        models_used(tenant, days=DAYS_MAX), names, request.GET if "metric" in request.GET else None
    )
    context: dict[str, Any] = {"console": console, "section": "limits", "form": form}
    if form.is_bound and form.is_valid():
        try:
            limit = proposed_limit(tenant=tenant, **form.limit())
            tried = on_replica(try_limit, tenant, limit, **form.traffic())
        except ValidationError as error:
            form.add_error(None, error.messages)
        except TooMuchTraffic as error:
            form.add_error(None, f"There were {error}: choose fewer days, or one key or model.")
        else:
            context |= {"limit": limit, "tried": tried, "days": sorted(tried.days.items())}
    return render(request, "inference/try_limit.html", context)
