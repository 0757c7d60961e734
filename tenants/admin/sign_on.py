"""Tenants' own sign-in: which provider vouches for which domain is the operator's to say."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from unfold.decorators import display

from tenants.admin.base import AuditedAdmin, actor_of
from tenants.models import Role, TenantSignOn
from tenants.services.sign_on import remove_sign_on, set_sign_on


class SignOnForm(forms.ModelForm):  # type: ignore[type-arg]  # not subscriptable at run time
    issuer = forms.URLField(
        label="provider", assume_scheme="https", help_text="Its address; what it can do is read from there."
    )
    client_id = forms.CharField(max_length=191)
    secret = forms.CharField(
        required=False,
        max_length=191,
        label="client secret",
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text="Empty keeps the one that is there.",
    )

    class Meta:
        model = TenantSignOn
        fields = ("tenant", "domain", "default_role")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            self.fields["issuer"].initial = self.instance.app.settings.get("server_url", "")
            self.fields["client_id"].initial = self.instance.app.client_id

    def clean_default_role(self) -> str:
        role = str(self.cleaned_data["default_role"])
        if role == Role.OWNER:
            raise ValidationError("Owners are made by owners.")
        return role

    def clean_issuer(self) -> str:
        issuer = str(self.cleaned_data["issuer"])
        if not issuer.startswith(("https://", "http://")):
            raise ValidationError("An address that begins with https://.")
        return issuer

    def clean_domain(self) -> str:
        return str(self.cleaned_data["domain"]).strip().lower()


@admin.register(TenantSignOn)
class TenantSignOnAdmin(AuditedAdmin):
    audit_name = "sign_on"
    form = SignOnForm
    list_display = ("domain", "tenant", "default_role", "created_at")
    list_select_related = ("tenant",)
    search_fields = ("domain", "tenant__name", "tenant__slug")
    autocomplete_fields = ("tenant",)
    fields = ("tenant", "domain", "issuer", "client_id", "secret", "default_role", "redirect_address")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return ("tenant", "domain", "redirect_address") if obj else ("redirect_address",)

    @display(description="redirect address")
    def redirect_address(self, obj: TenantSignOn) -> str:
        if obj.pk is None:
            return "Shown when it is saved: register it with the provider."
        path = reverse("openid_connect_callback", args=[obj.app.provider_id])
        return f"{settings.BASE_URL}{path}"

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Through the service, which writes the audit row."""
        saved = set_sign_on(
            actor=actor_of(request),
            tenant=obj.tenant,
            domain=obj.domain,
            issuer=form.cleaned_data["issuer"],
            client_id=form.cleaned_data["client_id"],
            secret=form.cleaned_data["secret"],
            default_role=Role(obj.default_role),
        )
        obj.pk, obj.app = saved.pk, saved.app

    @transaction.atomic
    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        remove_sign_on(actor=actor_of(request), sign_on=obj)

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        for sign_on in queryset:
            remove_sign_on(actor=actor_of(request), sign_on=sign_on)
