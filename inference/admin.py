"""The operator's view of the ledger, and of the usage events that did not fit into it."""

from __future__ import annotations

import json

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from unfold.decorators import action, display

from inference.models import ParkedUsageEvent, UsageRecord
from inference.services.usage import UnfitEvent, file_parked_event
from tenants.admin.base import ReadOnlyAdmin, actor_of

_REASONS = {
    "stop": "success",
    "length": "success",
    "cancelled": "warning",
    "deadline": "warning",
    "error": "danger",
}


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = ("ended", "tenant", "model", "tier", "ending", "prompt", "output", "seconds", "request_id")
    list_filter = ("finish_reason", "tier", "model", ("finished_at", admin.DateFieldListFilter))
    list_select_related = ("tenant",)
    search_fields = ("=request_id", "tenant__name", "tenant__slug", "=key_public_id", "=user_public_id")
    search_help_text = "Request id, tenant, or the public id of a key or person"
    ordering = ("-finished_at",)
    fieldsets = (
        (None, {"fields": ("request_id", "tenant", "model", "tier", "endpoint")}),
        ("Who", {"fields": ("key_public_id", "user_public_id")}),
        ("End", {"fields": ("finish_reason", "error_code", "attempts", "worker_id")}),
        ("Tokens", {"fields": ("prompt_tokens", "cached_tokens", "completion_tokens", "reservation_id")}),
        ("Times", {"fields": ("created_at", "claimed_at", "first_token_at", "finished_at", "recorded_at")}),
    )

    @display(description="finished", ordering="finished_at")
    def ended(self, record: UsageRecord) -> str:
        # To the second: a list of requests is read by the second.
        return timezone.localtime(record.finished_at).strftime("%Y-%m-%d %H:%M:%S")

    @display(description="prompt (cached)", ordering="prompt_tokens")
    def prompt(self, record: UsageRecord) -> str:
        return f"{record.prompt_tokens} ({record.cached_tokens})"

    @display(description="output", ordering="completion_tokens")
    def output(self, record: UsageRecord) -> int:
        return record.completion_tokens

    @display(description="end", ordering="finish_reason", label=_REASONS)
    def ending(self, record: UsageRecord) -> str:
        return record.finish_reason

    @display(description="seconds")
    def seconds(self, record: UsageRecord) -> str:
        return f"{(record.finished_at - record.created_at).total_seconds():.2f}"


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
