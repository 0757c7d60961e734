"""API keys: issue (the secret is shown once, on the answer's page alone), rename, revoke."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.cache import add_never_cache_headers
from unfold.decorators import action, display
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from tenants.admin.base import AuditedAdmin, actor_of
from tenants.admin.confirmation import ask_about_rows
from tenants.confirmation import Question
from tenants.counting import counted
from tenants.models import ApiKey
from tenants.principal import Scope
from tenants.services import issue_api_key, revoke_api_key

_SCOPES = {
    Scope.INFERENCE: "inference: run models",
    Scope.USAGE_READ: "usage:read: read the tenant's usage",
    Scope.KEYS_WRITE: "keys:write: issue and revoke keys",
    Scope.ADMIN: "admin: everything in the tenant",
}


class ApiKeyForm(forms.ModelForm):  # type: ignore[type-arg]  # not subscriptable at run time
    scopes = forms.MultipleChoiceField(
        choices=[(scope.value, text) for scope, text in _SCOPES.items()],
        initial=[Scope.INFERENCE.value],
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
    )

    def clean_expires_at(self) -> Any:
        expires_at = self.cleaned_data["expires_at"]
        if expires_at is not None and expires_at <= timezone.now() and "expires_at" in self.changed_data:
            raise forms.ValidationError("This moment has passed. To end a key now, revoke it.")
        return expires_at


class StateFilter(admin.SimpleListFilter):
    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("live", "live"), ("expired", "expired"), ("revoked", "revoked")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
        now = timezone.now()
        match self.value():
            case "live":
                return queryset.filter(Q(expires_at=None) | Q(expires_at__gt=now), revoked_at=None)
            case "expired":
                return queryset.filter(expires_at__lte=now, revoked_at=None)
            case "revoked":
                return queryset.filter(revoked_at__isnull=False)
        return queryset


@admin.register(ApiKey)
class ApiKeyAdmin(AuditedAdmin):
    audit_name = "key"
    form = ApiKeyForm
    list_display = ("name", "shown_prefix", "tenant", "state", "scope_list", "last_used", "created_at")
    list_filter = (StateFilter, "tenant__tier")
    list_select_related = ("tenant", "use")
    search_fields = ("name", "lookup_id", "tenant__name", "tenant__slug", "public_id")
    search_help_text = "Name, tenant, or the part of the key after wr_live_"
    autocomplete_fields = ("tenant",)
    actions = ("revoke",)
    add_fieldsets = ((None, {"fields": ("tenant", "name", "scopes", "expires_at")}),)
    fieldsets = (
        (None, {"fields": ("name", "tenant", "shown_prefix", "state", "scope_list", "expires_at")}),
        ("History", {"fields": ("public_id", "created_by", "created_at", "last_used", "revoked_at")}),
    )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.fieldsets if obj else self.add_fieldsets

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        if obj is None:
            return ()
        return (
            "tenant",
            "shown_prefix",
            "state",
            "scope_list",
            "public_id",
            "created_by",
            "created_at",
            "last_used",
            "revoked_at",
        )

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        # What a key may do is fixed when it is issued: an existing one shows its scopes, as text.
        form = super().get_form(request, obj, change=change, **kwargs)
        if obj is not None:
            form.base_fields.pop("scopes", None)
        return form

    @display(description="key")
    def shown_prefix(self, api_key: ApiKey) -> str:
        return f"{api_key.prefix}..."

    @display(description="state", label={"live": "success", "expired": "warning", "revoked": "danger"})
    def state(self, api_key: ApiKey) -> str:
        if api_key.revoked_at is not None:
            return "revoked"
        return (
            "expired" if api_key.expires_at is not None and api_key.expires_at <= timezone.now() else "live"
        )

    @display(description="scopes")
    def scope_list(self, api_key: ApiKey) -> str:
        return ", ".join(api_key.scopes)

    @display(description="last used", ordering="use__last_used_at", empty_value="never")
    def last_used(self, api_key: ApiKey) -> Any:
        use = getattr(api_key, "use", None)
        return use.last_used_at if use else None

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if change:
            super().save_model(request, obj, form, change)
            return
        issued = issue_api_key(
            actor=actor_of(request),
            tenant=obj.tenant,
            name=obj.name,
            scopes=[Scope(scope) for scope in form.cleaned_data["scopes"]],
            expires_at=obj.expires_at,
        )
        obj.__dict__.update(issued.api_key.__dict__)
        request.issued_secret = issued.secret  # type: ignore[attr-defined]  # for response_add, of this very request

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> HttpResponse:
        # Rendered here, not carried through a redirect: a message would put the secret into a cookie.
        response = TemplateResponse(
            request,
            "admin/tenants/apikey/issued.html",
            {
                **self.admin_site.each_context(request),
                "title": "API key issued",
                "opts": self.opts,
                "api_key": obj,
                "secret": request.issued_secret,  # type: ignore[attr-defined]
            },
        )
        add_never_cache_headers(response)
        return response

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # the ledger names it: revoke it instead

    @action(description="Revoke: refused everywhere within a second", permissions=("change",))
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> HttpResponse | None:
        """Asks first."""
        keys = list(queryset.select_related("tenant"))
        question = Question(
            f"Revoke {counted(len(keys), 'key')}?",
            "Every program that uses one is refused within a second. This cannot be undone.",
            "Revoke",
        )
        if asked := ask_about_rows(request, "revoke", keys, question):
            return asked
        done = sum(revoke_api_key(actor=actor_of(request), api_key=api_key) for api_key in keys)
        self.message_user(request, f"{done} revoked.")
        return None
