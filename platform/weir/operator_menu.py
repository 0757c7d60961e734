"""The operator's menu: by what they come for, and each entry only for those who may see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest
from django.urls import reverse_lazy

Entry = tuple[str, str, str]
"""Icon, title, and the model as app_name or a route of our own."""

_GROUPS: dict[str, list[Entry]] = {
    "Now": [
        ("monitoring", "Live: workers, queues", "admin_live"),
        ("query_stats", "Tenants: usage, limits", "admin_usage"),
    ],
    "Tenants": [
        ("domain", "Tenants", "tenants_tenant"),
        ("key", "API keys", "tenants_apikey"),
        ("folder", "Projects", "tenants_project"),
        ("speed", "Limits", "tenants_quotalimit"),
        ("person", "People", "tenants_user"),
        ("group", "Memberships", "tenants_membership"),
        ("admin_panel_settings", "Groups of operators", "auth_group"),
        ("login", "Single sign-on", "tenants_tenantsignon"),
    ],
    "Service": [
        ("neurology", "Models", "inference_modelsetting"),
        ("payments", "Prices", "tenants_modelprice"),
        ("stacks", "Tiers", "tenants_tier"),
        ("campaign", "Announcements", "inference_announcement"),
        ("construction", "Maintenance", "inference_maintenance"),
    ],
    "Records": [
        ("receipt_long", "Usage", "inference_usagerecord"),
        ("tune", "Adjustments", "inference_usageadjustment"),
        ("pause_circle", "Parked events", "inference_parkedusageevent"),
        ("notifications", "Alerts", "inference_alert"),
        ("history", "Audit", "tenants_auditentry"),
    ],
}


def operator_menu() -> list[dict[str, Any]]:
    """As django-unfold's SIDEBAR wants its `navigation`."""
    return [
        {"title": title, "separator": True, "items": [_item(*entry) for entry in entries]}
        for title, entries in _GROUPS.items()
    ]


def _item(icon: str, title: str, name: str) -> dict[str, Any]:
    if name.startswith("admin_"):
        return {"icon": icon, "title": title, "link": reverse_lazy(name)}
    link = reverse_lazy(f"admin:{name}_changelist")
    return {"icon": icon, "title": title, "link": link, "permission": _may_see(*name.split("_"))}


def _may_see(app: str, model: str) -> Callable[[HttpRequest], bool]:
    def may(request: HttpRequest) -> bool:
        user = request.user
        return user.has_perm(f"{app}.view_{model}") or user.has_perm(f"{app}.change_{model}")

    return may
