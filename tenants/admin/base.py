"""What the admin pages share: audited changes, and pages that only show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import cache
from typing import Any, cast

from django.db import models, transaction
from django.forms import BaseModelForm
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.decorators import display

from tenants.client_address import client_address
from tenants.models import Membership, QuotaLimit, Tenant, User
from tenants.services import Actor, record_audit
from tenants.templatetags.figures import count

LIST_ROWS = 25
"""On a page of a list. The theme takes some two milliseconds for each: fifty of the widest were too slow."""
_NEVER_RECORDED = frozenset({"password", "password1", "password2", "usable_password", "digest"})

_INLINE_NAMES = {Membership: "member", QuotaLimit: "limit"}
"""The first part of the action for rows that are edited in their owner's page."""


def actor_of(request: HttpRequest) -> Actor:
    return Actor.person(cast(User, request.user), ip_address=client_address(request))


class OurAdmin(ModelAdmin):
    """Lists as all of ours are: a screenful a page, whole numbers grouped by thousands as in the console."""

    show_full_result_count = False
    list_per_page = LIST_ROWS

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        fields = {field.name: field for field in self.model._meta.concrete_fields}
        return [
            _grouped(fields[name]) if isinstance(fields.get(name), models.IntegerField) else name
            for name in super().get_list_display(request)
        ]


@cache  # asked for twice in a request, and compared
def _grouped(field: models.Field[Any, Any]) -> Callable[[Any], str | None]:
    def column(row: Any) -> str | None:
        value = getattr(row, field.attname)
        return None if value is None else count(value)

    column.__name__ = field.name
    shown: Callable[[Any], str | None] = display(
        column, description=str(field.verbose_name), ordering=field.name
    )
    return shown


class AuditedAdmin(OurAdmin):
    """Each creation, change and deletion through a form writes an audit row in the same transaction."""

    audit_name = ""
    """The first part of the action: `tier` gives `tier.created`, `tier.changed`, `tier.deleted`."""
    compressed_fields = True
    warn_unsaved_form = True

    def audit_tenant(self, obj: Any) -> Tenant | None:
        """The tenant whose history this belongs to; None for the operator's own affairs."""
        tenant: Tenant | None = getattr(obj, "tenant", None)
        return tenant

    def record(
        self,
        request: HttpRequest,
        obj: Any,
        verb: str,
        *,
        before: dict[str, Any] | None = None,
        after: dict[str, Any] | None = None,
    ) -> None:
        record_audit(
            actor=actor_of(request),
            action=f"{self.audit_name}.{verb}",
            tenant=self.audit_tenant(obj),
            target=obj,
            before=before,
            after=after,
        )

    @transaction.atomic
    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        self._record_form(request, obj, form, change)

    @transaction.atomic
    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        # Written first: afterwards the row has no id to speak of, and a cascade may take what it refers to.
        self.record(request, obj, "deleted", before=_all_of(obj))
        super().delete_model(request, obj)

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        for obj in queryset:
            self.record(request, obj, "deleted", before=_all_of(obj))
        super().delete_queryset(request, queryset)

    @transaction.atomic
    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        # Read before they are gone: afterwards a row has no id to be named by.
        deleted = [
            (
                copy(row_form.instance),
                {"was": str(row_form.instance), **_plain(row_form.initial, row_form.initial)},
            )
            for row_form in formset.deleted_forms
            if row_form.instance.pk
        ]
        super().save_formset(request, form, formset, change)
        name = _INLINE_NAMES[formset.model]
        shown = {row_form.instance.pk: row_form for row_form in formset.forms}
        for row, values in deleted:
            self._record_row(request, form.instance, row, f"{name}.deleted", before=values)
        for row in formset.new_objects:
            after = {"is": str(row), **_plain(shown[row.pk].cleaned_data, _recorded(shown[row.pk]))}
            self._record_row(request, form.instance, row, f"{name}.created", after=after)
        for row, fields in formset.changed_objects:
            before = _plain(shown[row.pk].initial, fields)
            after = {"is": str(row), **_plain(shown[row.pk].cleaned_data, fields)}
            self._record_row(request, form.instance, row, f"{name}.changed", before=before, after=after)

    def _record_row(self, request: HttpRequest, parent: Any, row: Any, action: str, **values: Any) -> None:
        record_audit(
            actor=actor_of(request), action=action, tenant=self.audit_tenant(parent), target=row, **values
        )

    def _record_form(self, request: HttpRequest, obj: Any, form: BaseModelForm[Any], change: bool) -> None:
        fields = _recorded(form)
        if not change:
            self.record(request, obj, "created", after=_plain(form.cleaned_data, fields))
        elif form.changed_data:
            self.record(
                request,
                obj,
                "changed",
                before=_plain(form.initial, fields),
                after=_plain(form.cleaned_data, fields),
            )


class NamesModels(ModelAdmin):
    """A form that names a model offers those that there are: a price or limit of a misspelt one holds for none."""

    change_form_template = "admin/with_model_names.html"
    model_name_fields: tuple[str, ...] = ("model",)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and db_field.name in self.model_name_fields:
            field.widget.attrs["list"] = "model-names"
        return field


class ReadOnlyAdmin(OurAdmin):
    """Shows, and lets nobody add, change or delete: not even a superuser."""

    actions_list: tuple[Any, ...] = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def _all_of(obj: models.Model) -> dict[str, Any]:
    """What is about to go, by its columns; secrets and their digests are not told."""
    fields = [field.attname for field in obj._meta.concrete_fields if not field.attname.endswith("digest")]
    values = {name: getattr(obj, name) for name in fields if name not in _NEVER_RECORDED}
    return {"was": str(obj), **_plain(values, values)}


def _recorded(form: BaseModelForm[Any]) -> list[str]:
    return [name for name in form.changed_data if name not in _NEVER_RECORDED]


def _plain(values: Any, fields: Iterable[str]) -> dict[str, Any]:
    return {name: _json(values.get(name)) for name in fields}


def _json(value: Any) -> Any:
    if isinstance(value, models.QuerySet | list | tuple | set):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
