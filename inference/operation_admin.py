"""The operator's admin of the installation: models, maintenance, announcements."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from unfold.decorators import display

from inference.models import Announcement, Maintenance, ModelSetting
from tenants.admin.base import AuditedAdmin, NamesModels
from tenants.counting import counted


class ModelSettingForm(forms.ModelForm):  # type: ignore[type-arg]  # not subscriptable at run time
    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or self.cleaned_data
        target = cleaned.get("target", "")
        if target and ModelSetting.objects.filter(name=target).exclude(target="").exists():
            self.add_error("target", "That is an alias itself: name the model that it stands for.")
        if ":" in cleaned.get("name", ""):
            self.add_error("name", "A name with a colon means a model's adapter: leave it out.")
        return cleaned


@admin.register(ModelSetting)
class ModelSettingAdmin(NamesModels, AuditedAdmin):
    audit_name = "model"
    model_name_fields = ("name", "target")
    form = ModelSettingForm
    list_display = ("name", "target", "visible_to", "context_length", "temperature", "max_tokens")
    search_fields = ("name", "target")
    autocomplete_fields = ("tenants",)
    fieldsets = (
        (
            None,
            {
                "fields": ("name", "target"),
                "description": "A model needs no entry to be served: this is for what differs.",
            },
        ),
        ("Who may use it", {"fields": ("is_public", "tenants")}),
        ("Where a request names nothing", {"fields": ("temperature", "top_p", "max_tokens")}),
        ("Bounds", {"fields": ("context_length",)}),
    )

    @display(description="for")
    def visible_to(self, row: ModelSetting) -> str:
        if row.is_public:
            return "every tenant"
        count = row.tenants.count()
        return counted(count, "tenant")

    def audit_tenant(self, obj: Any) -> None:
        return None


@admin.register(Maintenance)
class MaintenanceAdmin(AuditedAdmin):
    audit_name = "maintenance"
    fields = ("is_on", "message", "retry_after_s")

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """There is but one: its page."""
        row, _ = Maintenance.objects.get_or_create(pk=1)
        return redirect("admin:inference_maintenance_change", row.pk)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def audit_tenant(self, obj: Any) -> None:
        return None


@admin.register(Announcement)
class AnnouncementAdmin(AuditedAdmin):
    audit_name = "announcement"
    list_display = ("text", "is_warning", "state", "begins_at", "ends_at")
    fields = ("text", "is_warning", "begins_at", "ends_at")

    @display(description="state", label={"shown": "success"})
    def state(self, row: Announcement) -> str:
        now = timezone.now()
        if row.begins_at is not None and row.begins_at > now:
            return "to come"
        return "over" if row.ends_at is not None and row.ends_at <= now else "shown"

    def audit_tenant(self, obj: Any) -> None:
        return None
