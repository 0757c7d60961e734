"""The console's pages about what was used: by day, and request by request."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from inference import selectors
from inference.charts import chart_of_days, chart_of_ranks, days_back
from inference.downloads import download
from inference.ranking import COLUMNS, Measure, Rank, Ranking, ranking
from inference.replica import on_replica
from inference.reports import Dimension
from inference.request_log import Ending, Wanted, keys_used, log_page, models_used, timeline
from inference.selectors import DayOfModel
from inference.services.explain import Explanation, NothingToExplain, explain
from tenants.console import Console, tenant_page
from tenants.csv_text import as_csv
from tenants.selectors import api_key_names, projects_with_keys

_SPANS = (7, 30, 90)
_CHOICES_DAYS = 90
_BY_DAY = "day"
_RANKED = 25
_RANKED_IN_A_FILE = 10_000
_DRAWN = 6


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the page of usage shows, as its address says."""

    days: int
    by: Dimension | None
    """None: day by day."""
    rank: Measure
    wanted: Wanted

    def query(self, **other: Any) -> str:
        """The address of the same page with something else in it."""
        fields = {
            "days": self.days,
            "by": self.by or _BY_DAY,
            "rank": self.rank,
            "model": self.wanted.model,
            "key": self.wanted.key or "",
            "project": self.wanted.project or "",
            **other,
        }
        return urlencode({name: value for name, value in fields.items() if value != ""})


def _asked(request: HttpRequest) -> _Asked:
    by, rank = request.GET.get("by", ""), request.GET.get("rank", "")
    return _Asked(
        days=_days(request),
        by=Dimension(by) if by in COLUMNS else None,
        rank=Measure(rank) if rank in list(Measure) else Measure.TOKENS,
        wanted=_wanted(request),
    )


def _ranking(console: Console, asked: _Asked, by: Dimension, rows: list[DayOfModel], limit: int) -> Ranking:
    return on_replica(
        ranking,
        console.tenant,
        rows,
        by,
        asked.rank,
        days=asked.days,
        wanted=asked.wanted,
        limit=limit,
        drawn=_DRAWN,
    )


@require_safe
@tenant_page
def usage(request: HttpRequest, console: Console) -> HttpResponse:
    """Day by day, or ranked by what used most."""
    asked = _asked(request)
    rows = _rows(console, asked.days, asked.wanted)
    ranked = _ranking(console, asked, asked.by, rows, _RANKED) if asked.by else None
    days = days_back(selectors.today_of(console.tenant), asked.days)
    context = {
        "console": console,
        "section": "usage",
        "asked": asked,
        "days": asked.days,
        "spans": [(span, asked.query(days=span)) for span in _SPANS],
        "ways": [(way, asked.query(by=way)) for way in (_BY_DAY, *COLUMNS)],
        "orders": {measure.value: asked.query(rank=measure) for measure in Measure},
        "rows": rows,
        "ranking": ranked,
        "ranks": ranked and _shown(asked, ranked),
        "total": selectors.total(rows),
        "chart": chart_of_ranks(rows, ranked.first[:_DRAWN], days) if ranked else chart_of_days(rows, days),
        "wanted": asked.wanted,
        "projects": projects_with_keys(console.tenant),
        "query": asked.query(),
        **_choices(console, asked.wanted.key),
    }
    return render(request, "inference/usage.html", context)


def _shown(asked: _Asked, ranked: Ranking) -> list[tuple[Rank, str, int]]:
    """Each with the address of its days, which is "" where no filter can name it, and its percentage of the first's."""
    most = max((rank.of(asked.rank) for rank in ranked.first), default=0)
    return [
        (
            rank,
            asked.query(by=_BY_DAY, **{str(asked.by): rank.value}) if rank.value else "",
            100 * max(rank.of(asked.rank), 0) // most if most > 0 else 0,
        )
        for rank in ranked.first
    ]


_COUNTS = ("requests", "failed", "prompt_tokens", "completion_tokens", "cost_usd")


@require_safe
@tenant_page
def usage_csv(request: HttpRequest, console: Console) -> HttpResponse:
    asked = _asked(request)
    rows = _rows(console, asked.days, asked.wanted)
    if asked.by:
        ranked = _ranking(console, asked, asked.by, rows, _RANKED_IN_A_FILE)
        ranks = [*ranked.first, *([ranked.others] if ranked.others else [])]
        header = (asked.by.value, "name", *_COUNTS)
        lines = [(rank.value, rank.name, *_figures(rank)) for rank in ranks]
    else:
        header = (_BY_DAY, "model", *_COUNTS)
        lines = [(row.day.isoformat(), row.model, *_figures(row)) for row in rows]
    name = f"usage-{timezone.now():%Y-%m-%d}-{asked.days}d{f'-by-{asked.by}' if asked.by else ''}.csv"
    return download(as_csv(header, lines), name, "text/csv; charset=utf-8")


def _figures(row: DayOfModel | Rank) -> tuple[Any, ...]:
    cost = Decimal(row.cost_microusd).scaleb(-6)
    return row.requests, row.failed, row.prompt_tokens, row.completion_tokens, cost


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
    if record is None and explained.verdict == "admitted":
        raise Http404  # it has not ended
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
