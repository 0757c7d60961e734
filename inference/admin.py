"""The operator's view of the ledger, and of the usage events that did not fit into it."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from unfold.decorators import action, display

from inference.models import Alert, ParkedUsageEvent, UsageAdjustment, UsageRecord
from inference.operation_admin import AnnouncementAdmin, MaintenanceAdmin, ModelSettingAdmin
from inference.services.ledger import UnfitEvent, adjust_usage, file_parked_event
from tenants.admin.base import OurAdmin, ReadOnlyAdmin, actor_of
from tenants.models import Tier
from tenants.templatetags.figures import count, usd

__all__ = ["AnnouncementAdmin", "MaintenanceAdmin", "ModelSettingAdmin"]

_REASONS = {
    "stop": "success",
    "length": "success",
    "cancelled": "warning",
    "deadline": "warning",
    "error": "danger",
}


class EndFilter(admin.SimpleListFilter):
    title = "finish reason"
    parameter_name = "finish_reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(reason, reason) for reason in _REASONS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(finish_reason=self.value()) if self.value() else queryset


class TierFilter(admin.SimpleListFilter):
    title = "tier"
    parameter_name = "tier"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in Tier.objects.order_by("rank").values_list("name", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(tier=self.value()) if self.value() else queryset


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = (
        "accepted",
        "tenant",
        "model",
        "tier",
        "ending",
        "prompt",
        "output",
        "cost",
        "seconds",
        "request_id",
    )
    # Not what Django's own filters would: look for each value of a column through every row.
    list_filter = (EndFilter, TierFilter, ("created_at", admin.DateFieldListFilter))
    list_select_related = ("tenant",)
    search_fields = (
        "=request_id",
        "=model",
        "tenant__name",
        "tenant__slug",
        "=key_public_id",
        "=user_public_id",
    )
    search_help_text = "Request id, model, tenant, or the public id of a key or person"
    ordering = ("-created_at", "-id")
    fieldsets = (
        (None, {"fields": ("request_id", "tenant", "model", "tier", "endpoint")}),
        ("Who", {"fields": ("key_public_id", "user_public_id")}),
        ("End", {"fields": ("finish_reason", "error_code", "attempts", "worker_id")}),
        ("Tokens", {"fields": ("prompt", "output", "reservation_id")}),
        ("Cost", {"fields": ("cost", "price_public_id", "day")}),
        ("Times", {"fields": ("created_at", "claimed_at", "first_token_at", "finished_at", "recorded_at")}),
    )

    @display(description="accepted", ordering="created_at")
    def accepted(self, record: UsageRecord) -> str:
        # To the second: a list of requests is read by the second.
        return timezone.localtime(record.created_at).strftime("%Y-%m-%d %H:%M:%S")

    @display(description="prompt (cached)", ordering="prompt_tokens")
    def prompt(self, record: UsageRecord) -> str:
        return f"{count(record.prompt_tokens)} ({count(record.cached_tokens)})"

    @display(description="output", ordering="completion_tokens")
    def output(self, record: UsageRecord) -> str:
        return count(record.completion_tokens)

    @display(description="cost", ordering="cost_microusd")
    def cost(self, record: UsageRecord) -> str:
        return usd(record.cost_microusd)

    @display(description="end", ordering="finish_reason", label=_REASONS)
    def ending(self, record: UsageRecord) -> str:
        return record.finish_reason

    @display(description="seconds")
    def seconds(self, record: UsageRecord) -> str:
        return f"{(record.finished_at - record.created_at).total_seconds():.2f}"


@admin.register(UsageAdjustment)
class UsageAdjustmentAdmin(OurAdmin):
    """Written once, changed never: what was wrong is put right by another one."""

    list_display = ("created_at", "tenant", "cost", "reason", "actor_label", "request_id")
    list_select_related = ("tenant",)
    search_fields = ("=request_id", "tenant__name", "tenant__slug", "reason", "actor_label")
    fields = ("tenant", "cost_microusd", "reason")
    autocomplete_fields = ("tenant",)

    @display(description="cost", ordering="cost_microusd")
    def cost(self, adjustment: UsageAdjustment) -> str:
        return usd(adjustment.cost_microusd)

    def save_model(self, request: HttpRequest, obj: UsageAdjustment, form: Any, change: bool) -> None:
        saved = adjust_usage(
            actor=actor_of(request), tenant=obj.tenant, cost_microusd=obj.cost_microusd, reason=obj.reason
        )
        obj.pk, obj.public_id = saved.pk, saved.public_id

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "tenant", "kind", "title", "period", "threshold", "mailed_at")
    list_filter = ("kind", ("mailed_at", admin.EmptyFieldListFilter))
    list_select_related = ("tenant",)
    search_fields = ("tenant__name", "tenant__slug", "title")


@admin.register(ParkedUsageEvent)
class ParkedUsageEventAdmin(ReadOnlyAdmin):
    list_display = ("parked_at", "request_id", "reason", "state")
    list_filter = (("filed_at", admin.EmptyFieldListFilter),)
    search_fields = ("request_id", "reason")
    actions = ("file_again",)
    fields = ("request_id", "reason", "event_fields", "parked_at", "filed_at")

    @display(description="state", label={"waits": "warning", "filed": "success"})
    def state(self, parked: ParkedUsageEvent) -> str:
        return "filed" if parked.filed_at else "waits"

    @display(description="event")
    def event_fields(self, parked: ParkedUsageEvent) -> str:
        text = json.dumps(parked.event, indent=2, ensure_ascii=False)
        return format_html('<pre class="whitespace-pre-wrap font-mono text-xs">{}</pre>', text)

    def has_file_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("inference.change_parkedusageevent")

    @action(description="File in the ledger, now that the cause is repaired", permissions=("file",))
    def file_again(self, request: HttpRequest, queryset: QuerySet[ParkedUsageEvent]) -> None:
        filed = 0
        for parked in queryset.filter(filed_at=None):
            try:
                file_parked_event(actor=actor_of(request), parked=parked)
                filed += 1
            except UnfitEvent as error:
                self.message_user(request, f"{parked.request_id}: {error}", messages.ERROR)
        self.message_user(request, f"{filed} filed.")
