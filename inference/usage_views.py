"""The console's pages about what was used: by day, and request by request."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from inference import selectors
from inference.downloads import download
from inference.replica import on_replica
from inference.request_log import Ending, Wanted, keys_used, log_page, models_used, timeline
from inference.selectors import DayOfModel
from inference.services.explain import Explanation, NothingToExplain, explain
from tenants.console import Console, tenant_page
from tenants.csv_text import as_csv
from tenants.selectors import api_key_names, projects_with_keys

_SPANS = (7, 30, 90)
_CHOICES_DAYS = 90


def _wanted(request: HttpRequest) -> Wanted:
    """From the address; what is not understood there narrows nothing."""
    asked = request.GET
    ending = asked.get("end", "")
    return Wanted(
        ending=Ending(ending) if ending in list(Ending) else None,
        model=asked.get("model", "").replace("\0", "")[:200],
        key=_id(asked.get("key", "")),
        project=_id(asked.get("project", "")),
    )


def _id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _rows(console: Console, days: int, wanted: Wanted) -> list[DayOfModel]:
    return on_replica(
        selectors.usage_by_day_and_model,
        console.tenant,
        days=days,
        model=wanted.model,
        key=wanted.key,
        project=wanted.project,
    )


def _days(request: HttpRequest) -> int:
    asked = request.GET.get("days", "")
    return int(asked) if asked.isdecimal() and int(asked) in _SPANS else _SPANS[1]


def _choices(console: Console, key: UUID | None) -> dict[str, Any]:
    return {
        "models": models_used(console.tenant, days=_CHOICES_DAYS),
        "keys": keys_used(console.tenant, days=_CHOICES_DAYS, chosen=key),
    }


@require_safe
@tenant_page
def usage(request: HttpRequest, console: Console) -> HttpResponse:
    days, wanted = _days(request), _wanted(request)
    rows = _rows(console, days, wanted)
    narrowed = {"model": wanted.model, "key": wanted.key or "", "project": wanted.project or ""}
    context = {
        "console": console,
        "section": "usage",
        "days": days,
        "spans": [(span, urlencode({"days": span, **narrowed})) for span in _SPANS],
        "rows": rows,
        "total": selectors.total(rows),
        "chart": _chart(console, rows, days),
        "wanted": wanted,
        "projects": projects_with_keys(console.tenant),
        "query": urlencode({"days": days, **narrowed}),
        **_choices(console, wanted.key),
    }
    return render(request, "inference/usage.html", context)


@require_safe
@tenant_page
def usage_csv(request: HttpRequest, console: Console) -> HttpResponse:
    days, wanted = _days(request), _wanted(request)
    rows = _rows(console, days, wanted)
    header = ("day", "model", "requests", "failed", "prompt_tokens", "completion_tokens", "cost_usd")
    content = as_csv(
        header,
        (
            (
                row.day.isoformat(), row.model, row.requests, row.failed, row.prompt_tokens, row.completion_tokens,
                Decimal(row.cost_microusd).scaleb(-6),
            )
            for row in rows
        ),
    )  # fmt: skip
    return download(content, f"usage-{timezone.now():%Y-%m-%d}-{days}d.csv", "text/csv; charset=utf-8")


@require_safe
@tenant_page
def request_log(request: HttpRequest, console: Console) -> HttpResponse:
    wanted = _wanted(request)
    records, cursor = log_page(console.tenant, wanted, before=request.GET.get("before", ""))
    names = api_key_names(console.tenant, {row.key_public_id for row in records if row.key_public_id})
    narrowed = {"end": wanted.ending or "", "model": wanted.model, "key": wanted.key or ""}
    context = {
        "console": console,
        "section": "requests",
        "requests": [(row, row.key_public_id and names.get(row.key_public_id)) for row in records],
        "wanted": wanted,
        "endings": list(Ending),
        "newest": urlencode(narrowed) if "before" in request.GET else "",
        "older": urlencode({**narrowed, "before": cursor}) if cursor else "",
        **_choices(console, wanted.key),
    }
    return render(request, "inference/request_log.html", context)


@require_safe
@tenant_page
def request_page(request: HttpRequest, console: Console, request_id: str) -> HttpResponse:
    """What happened, and why: also of a request that a limit refused, as long as that is known."""
    tenant = console.tenant
    try:
        explained = explain(tenant.pk, str(tenant.public_id), request_id.replace("\0", "")[:128])
    except NothingToExplain:
        raise Http404 from None
    record = None if explained.charge is None else explained.charge.record
    key_id = _key_of(explained)
    context = {
        "console": console,
        "section": "requests",
        "explained": explained,
        "decision": explained.decision,
        "record": record,
        "caller": key_id and api_key_names(tenant, {key_id}).get(key_id),
        "moments": record and timeline(record),
    }
    return render(
        request, "inference/request_page.html" if record else "inference/refusal_page.html", context
    )


def _key_of(explained: Explanation) -> UUID | None:
    if explained.charge is not None:
        return explained.charge.record.key_public_id
    told = explained.decision
    return UUID(told.key_id) if told and told.key_id else None


def _chart(console: Console, rows: list[DayOfModel], days: int) -> dict[str, Any]:
    """One point for each day, also for those without use: `[days, tokens in, tokens out, micro-USD]`."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        day = sums[row.day.toordinal()]
        day[0] += row.prompt_tokens
        day[1] += row.completion_tokens
        day[2] += row.cost_microusd
    today = selectors.today_of(console.tenant).toordinal()
    span = range(today - days + 1, today + 1)
    epoch = 719_163  # 1970-01-01 as a day of Python's calendar
    return {
        "days": [(day - epoch) * 86_400 for day in span],
        "values": [[sums[day][index] for day in span] for index in range(3)],
    }
