"""Limits: a list of all, and an inline in the tier's and the tenant's page."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import TabularInline
from unfold.decorators import display
from unfold.forms import PaginationInlineFormSet

from tenants.admin.base import AuditedAdmin, NamesModels
from tenants.models import QuotaLimit, Tenant
from tenants.principal import LimitMetric, LimitScope


class LimitForm(forms.ModelForm):  # type: ignore[type-arg]  # not subscriptable at run time
    """Burst may be left out (it is then the amount); concurrency and budgets have no period."""

    burst = forms.IntegerField(
        required=False, min_value=1, help_text="What may be used at once. Empty: the amount."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The theme has styled the field it made itself; ours takes over its look.
        self.fields["burst"].widget = self.fields["amount"].widget.__class__(
            attrs={**self.fields["amount"].widget.attrs, "min": 1}
        )

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or self.cleaned_data
        amount = cleaned.get("amount")
        if cleaned.get("metric") == LimitMetric.CONCURRENCY.value or cleaned.get("calendar"):
            cleaned["period_s"], cleaned["burst"] = 0, amount
        elif not cleaned.get("burst"):
            cleaned["burst"] = amount
        if not cleaned.get("calendar"):
            cleaned["is_hard"] = True  # only a budget can be soft
        api_key, tenant = cleaned.get("api_key"), cleaned.get("tenant")
        if api_key is not None:
            if tenant is None:
                cleaned["tenant"] = api_key.tenant
            elif api_key.tenant_id != tenant.pk:
                self.add_error("api_key", f"This key belongs to {api_key.tenant}.")
        return cleaned


class OwnedLimitForm(LimitForm):
    """In the owner's page, which says what the limit belongs to."""

    scope: LimitScope

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instance.scope = self.scope.value


class TierLimitForm(OwnedLimitForm):
    scope = LimitScope.TIER


class TenantLimitForm(OwnedLimitForm):
    scope = LimitScope.TENANT


class LimitFormSet(PaginationInlineFormSet):
    """One limit of a kind: the model's constraints see rows that are saved, not each other's."""

    def clean(self) -> None:
        super().clean()
        taken = set()
        for form in self.forms:
            cleaned = getattr(form, "cleaned_data", {})
            if not cleaned or cleaned.get("DELETE"):
                continue
            kind = tuple(cleaned.get(name) for name in ("metric", "period_s", "calendar"))
            if kind in taken:
                form.add_error("metric", "Another row limits this over the same period.")
            taken.add(kind)


class LimitInline(TabularInline):
    model = QuotaLimit
    formset = LimitFormSet
    extra = 0
    hide_title = True
    fields = ("metric", "amount", "period_s", "burst", "calendar", "is_hard")
    verbose_name = "limit"
    verbose_name_plural = "limits"


class TierLimitInline(LimitInline):
    form = TierLimitForm
    fk_name = "tier"


class TenantLimitInline(LimitInline):
    form = TenantLimitForm
    fk_name = "tenant"

    def get_queryset(self, request: HttpRequest) -> QuerySet[QuotaLimit]:
        # A key's limit names its tenant as well; it is edited in the list of all limits.
        rows: QuerySet[QuotaLimit] = super().get_queryset(request)
        return rows.filter(scope=LimitScope.TENANT.value)


_SCOPES = {"tier": "info", "tenant": "success", "model": "success", "key": "warning"}


@admin.register(QuotaLimit)
class QuotaLimitAdmin(NamesModels, AuditedAdmin):
    audit_name = "limit"
    form = LimitForm
    list_display = ("owner", "scope_label", "metric", "amount", "period", "burst", "updated_at")
    list_display_links = ("owner",)
    list_filter = ("scope", "metric", "tier")
    list_select_related = ("tier", "tenant", "api_key")
    search_fields = ("tenant__name", "tenant__slug", "tier__name", "api_key__name", "api_key__lookup_id")
    search_help_text = "Tenant, tier or key"
    autocomplete_fields = ("tier", "tenant", "api_key")
    fieldsets = (
        (
            "Whose",
            {
                "fields": ("scope", "tier", "tenant", "model", "api_key"),
                "description": "A tier, a tenant, a tenant's use of one model, or a key.",
            },
        ),
        ("How much", {"fields": ("metric", "amount", "period_s", "burst", "calendar", "is_hard")}),
    )

    @display(description="owner")
    def owner(self, limit: QuotaLimit) -> str:
        owner = str(limit.api_key or limit.tenant or limit.tier)
        return f"{owner}: {limit.model}" if limit.model else owner

    @display(description="scope", ordering="scope", label=_SCOPES)
    def scope_label(self, limit: QuotaLimit) -> str:
        return limit.scope

    @display(description="per", ordering="period_s")
    def period(self, limit: QuotaLimit) -> str:
        if limit.calendar:
            return f"{limit.calendar}, {'hard' if limit.is_hard else 'soft'} budget"
        names = {0: "at once", 1: "second", 60: "minute", 3600: "hour", 86_400: "day"}
        return names.get(limit.period_s, f"{limit.period_s} s")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("scope", "tier", "tenant", "model", "api_key", "metric") if obj else ()

    def audit_tenant(self, obj: QuotaLimit) -> Tenant | None:
        return obj.tenant
