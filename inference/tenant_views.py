"""The console's pages about the tenant itself: its settings, and its audit log."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from inference.downloads import download
from tenants.audit_log import COLUMNS, AuditWanted, audit_actions, audit_page, audit_rows
from tenants.client_address import client_address
from tenants.console import Console, tenant_page
from tenants.csv_text import as_csv
from tenants.models.tenant import zone_names
from tenants.services import Actor, change_tenant

_ZONES: Final = sorted(zone for zone in zone_names() if "/" in zone and not zone.startswith("Etc/"))
_AUDIT_ROWS = 25
"""A page of the log: each may say many values."""


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def settings_page(request: HttpRequest, console: Console) -> HttpResponse:
    name, zone, refusal = console.tenant.name, console.tenant.timezone, ""
    zones = ["UTC", *_ZONES]
    if zone not in zones:
        zones.insert(0, zone)
    if request.method == "POST":
        _require_administrator(console)
        name, zone = request.POST.get("name", ""), request.POST.get("timezone", "")
        actor = Actor.person(console.user, ip_address=client_address(request))
        try:
            is_changed = change_tenant(actor=actor, tenant=console.tenant, name=name, timezone=zone)
        except ValidationError as error:
            refusal = " ".join(error.messages)
        else:
            messages.success(request, "Saved." if is_changed else "Nothing was changed.")
            return redirect("settings", console.tenant.public_id)
    context = {
        "console": console,
        "section": "settings",
        "zones": zones,
        "name": name,
        "zone": zone,
        "refusal": refusal,
    }
    return render(request, "inference/settings.html", context)


@require_safe
@tenant_page
def audit(request: HttpRequest, console: Console) -> HttpResponse:
    """Searched by the address of the page; `?form=csv` is the same as a file."""
    _require_administrator(console)
    wanted = _wanted(request, console)
    if request.GET.get("form") == "csv":
        content = as_csv(COLUMNS, audit_rows(console.tenant.pk, wanted))
        return download(content, "audit.csv", "text/csv; charset=utf-8")
    before = request.GET.get("before", "")
    entries, older = audit_page(console.tenant.pk, wanted, limit=_AUDIT_ROWS, before=before)
    asked = {"q": wanted.text, "action": wanted.action, "since": request.GET.get("since", "")}
    asked["until"] = request.GET.get("until", "")
    narrowed = {name: value for name, value in asked.items() if value}
    context: dict[str, Any] = {
        "console": console,
        "section": "audit",
        "entries": [(entry, _changes(entry.before, entry.after)) for entry in entries],
        "actions": audit_actions(console.tenant.pk),
        "asked": asked,
        "is_narrowed": asdict(wanted) != asdict(AuditWanted()),
        "newest": urlencode(narrowed) if before else "",
        "is_first": not before,
        "older": urlencode({**narrowed, "before": older}) if older else "",
        "csv": urlencode({**narrowed, "form": "csv"}),
    }
    return render(request, "inference/audit.html", context)


def _wanted(request: HttpRequest, console: Console) -> AuditWanted:
    """What is not understood narrows nothing. Days are the tenant's; the last one is meant whole."""
    since, until = _day(request, console, "since"), _day(request, console, "until")
    return AuditWanted(
        text=request.GET.get("q", "")[:200].strip(),
        action=request.GET.get("action", "")[:64],
        since=since,
        until=None if until is None else until + timedelta(days=1),
    )


def _day(request: HttpRequest, console: Console, name: str) -> datetime | None:
    try:
        day = datetime.strptime(request.GET.get(name, ""), "%Y-%m-%d")  # noqa: DTZ007 - its zone is given next
        return day.replace(tzinfo=console.tenant.zone) if 2000 <= day.year <= 9000 else None
    except ValueError:
        return None


def _changes(before: Any, after: Any) -> list[tuple[str, str, str]]:
    """(what, before, after) of each value that the entry has; "" where there was or is none."""
    old = before if isinstance(before, dict) else {}
    new = after if isinstance(after, dict) else {}
    shown = [(name, _shown(old.get(name)), _shown(new.get(name))) for name in {**old, **new}]
    return [(name, was, now) for name, was, now in shown if was or now]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _require_administrator(console: Console) -> None:
    if not console.may_administer:
        raise PermissionDenied
