"""People: sign in by e-mail. Accounts are deactivated, not deleted: the audit log names them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import transaction
from django.http import HttpRequest
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from tenants.admin.base import AuditedAdmin
from tenants.models import User
from tenants.services.people import know_address

admin.site.unregister(Group)


@admin.register(Group)
class GroupAdmin(AuditedAdmin, DjangoGroupAdmin):
    audit_name = "group"

    def audit_tenant(self, obj: Any) -> None:
        return None


class NewUserForm(UserCreationForm):
    class Meta:
        model = User
        fields = ("email",)


class ChangedUserForm(UserChangeForm):
    class Meta:
        model = User
        fields = "__all__"


@admin.register(User)
class UserAdmin(AuditedAdmin, DjangoUserAdmin):  # type: ignore[type-arg]  # not subscriptable at run time
    audit_name = "user"
    form = ChangedUserForm
    add_form = NewUserForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("email", "first_name", "last_name", "is_active", "is_staff", "last_login", "date_joined")
    list_filter = ("is_staff", "is_superuser", "is_active")
    search_fields = ("email", "first_name", "last_name")
    ordering = ("email",)
    filter_horizontal = ()
    readonly_fields = ("public_id", "last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("email", "password", "first_name", "last_name")}),
        ("Rights", {"fields": ("is_active", "is_staff", "is_superuser", "groups")}),
        ("History", {"fields": ("public_id", "last_login", "date_joined")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "usable_password", "password1", "password2")}),)

    def audit_tenant(self, obj: Any) -> None:
        return None

    @transaction.atomic
    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        know_address(obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def user_change_password(self, request: HttpRequest, id: str, form_url: str = "") -> Any:
        response = super().user_change_password(request, id, form_url)
        if request.method == "POST" and response.status_code == 302:
            user = self.get_object(request, id)
            if user is not None:
                self._record_password(request, user)
        return response

    def _record_password(self, request: HttpRequest, user: User) -> None:
        with transaction.atomic():
            self.record(request, user, "password_set")
