"""Tiers, tenants and members."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse
from unfold.admin import TabularInline
from unfold.decorators import action, display

from tenants.admin.base import AuditedAdmin, actor_of
from tenants.admin.confirmation import ask_about_rows
from tenants.admin.limits import TenantLimitInline, TierLimitInline
from tenants.confirmation import Question
from tenants.counting import counted
from tenants.models import Membership, Project, Tenant, Tier
from tenants.selectors import default_tier, with_people_and_keys
from tenants.services import resume_tenant, suspend_tenant


@admin.register(Tier)
class TierAdmin(AuditedAdmin):
    audit_name = "tier"
    list_display = (
        "name",
        "rank",
        "weight",
        "max_queued",
        "max_queued_per_tenant",
        "deadline",
        "max_output_tokens",
        "tenant_count",
    )
    search_fields = ("name",)
    inlines = (TierLimitInline,)
    fieldsets = (
        (None, {"fields": ("name", "rank", "weight")}),
        ("Queue", {"fields": ("max_queued", "max_queued_per_tenant", "max_wait_s", "deadline_s")}),
        ("Generation", {"fields": ("max_output_tokens",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tier]:
        rows: QuerySet[Tier] = super().get_queryset(request)
        return rows.annotate(tenants_in_it=Count("tenants"))

    @display(description="tenants", ordering="tenants_in_it")
    def tenant_count(self, tier: Any) -> int:
        count: int = tier.tenants_in_it
        return count

    @display(description="deadline", ordering="deadline_s")
    def deadline(self, tier: Tier) -> str:
        return f"{tier.deadline_s} s"

    def audit_tenant(self, obj: Any) -> None:
        return None


class MembershipInline(TabularInline):
    model = Membership
    extra = 0
    hide_title = True
    fields = ("user", "role")
    autocomplete_fields = ("user",)


@admin.register(Tenant)
class TenantAdmin(AuditedAdmin):
    audit_name = "tenant"
    list_display = ("name", "slug", "tier", "state", "member_count", "key_count", "created_at")
    list_filter = ("tier", ("suspended_at", admin.EmptyFieldListFilter))
    list_select_related = ("tier",)
    search_fields = ("name", "slug", "public_id")
    prepopulated_fields = {"slug": ("name",)}
    inlines = (MembershipInline, TenantLimitInline)
    actions = ("suspend", "resume")
    readonly_fields = ("public_id", "suspended_at", "suspended_reason", "created_at")
    fieldsets = (
        (None, {"fields": ("name", "slug", "tier", "weight", "timezone")}),
        ("State", {"fields": ("public_id", "suspended_at", "suspended_reason", "created_at")}),
    )

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {"tier": default_tier(), **super().get_changeform_initial_data(request)}

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        # Before it is saved it has no state: the id that Django would show there is not the one that it gets.
        return self.fieldsets if obj else self.fieldsets[:1]

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        super().save_related(request, form, formsets, change)
        tenant = form.instance
        if change or tenant.limits.exists():
            return
        if tenant.tier.limits.exists():
            words = f"{tenant} has no limits of its own: those of its tier, {tenant.tier}, hold."
            self.message_user(request, words, messages.INFO)
        else:
            words = (
                f"Nothing limits what {tenant} may use: neither it nor its tier, {tenant.tier}, has a limit."
            )
            self.message_user(request, words, messages.WARNING)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        rows: QuerySet[Tenant] = super().get_queryset(request)
        return with_people_and_keys(rows)

    @display(description="members", ordering="people")
    def member_count(self, tenant: Any) -> int:
        count: int = tenant.people
        return count

    @display(description="live keys", ordering="live_keys")
    def key_count(self, tenant: Any) -> int:
        count: int = tenant.live_keys
        return count

    @display(description="state", label={"active": "success", "suspended": "danger"})
    def state(self, tenant: Tenant) -> str:
        return "suspended" if tenant.is_suspended else "active"

    def get_prepopulated_fields(self, request: HttpRequest, obj: Any = None) -> dict[str, Any]:
        # Renaming a tenant must not quietly move its slug.
        return {} if obj else {"slug": ("name",)}

    def audit_tenant(self, obj: Tenant) -> Tenant:
        return obj

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # its ledger refers to it: suspend it instead

    @action(description="Suspend: refuse its keys and members", permissions=("change",))
    def suspend(self, request: HttpRequest, queryset: QuerySet[Tenant]) -> HttpResponse | None:
        """Asks first, and why."""
        tenants = list(queryset)
        question = Question(
            f"Suspend {counted(len(tenants), 'tenant')}?",
            "Their keys are refused from now on, what runs for them stops, and their members can look but not chat, "
            "until they are resumed.",
            "Suspend",
            keep="Leave them",
        )
        reason = "Why, for their members to read"
        if asked := ask_about_rows(request, "suspend", tenants, question, reason=reason):
            return asked
        why = request.POST.get("reason", "").replace("\0", "").strip()
        done = sum(suspend_tenant(actor=actor_of(request), tenant=tenant, reason=why) for tenant in tenants)
        self.message_user(request, f"{done} suspended.")
        return None

    @action(description="Resume", permissions=("change",))
    def resume(self, request: HttpRequest, queryset: QuerySet[Tenant]) -> None:
        done = sum(resume_tenant(actor=actor_of(request), tenant=tenant) for tenant in queryset)
        self.message_user(request, f"{done} resumed.")


@admin.register(Project)
class ProjectAdmin(AuditedAdmin):
    audit_name = "project"
    list_display = ("name", "tenant", "created_at")
    list_select_related = ("tenant",)
    search_fields = ("name", "tenant__name", "tenant__slug")
    autocomplete_fields = ("tenant",)
    fields = ("tenant", "name")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("tenant",) if obj else ()  # its keys are the tenant's


@admin.register(Membership)
class MembershipAdmin(AuditedAdmin):
    audit_name = "member"
    list_display = ("user", "tenant", "role", "created_at")
    list_filter = ("role",)
    list_select_related = ("user", "tenant")
    search_fields = ("user__email", "tenant__name", "tenant__slug")
    autocomplete_fields = ("user", "tenant")
    fields = ("tenant", "user", "role")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("tenant", "user") if obj else ()
