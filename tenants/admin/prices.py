"""What models cost. A price in force is only shown; a new one takes its place from its moment on."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils import timezone

from tenants.admin.base import NamesModels, OurAdmin, actor_of
from tenants.models import ModelPrice
from tenants.services.prices import refuse_past, set_model_price


class PriceForm(ModelForm):  # type: ignore[type-arg]  # not subscriptable at run time
    def clean_valid_from(self) -> Any:
        valid_from = self.cleaned_data["valid_from"]
        try:
            refuse_past(valid_from)
        except ValidationError as error:
            raise ValidationError(error.messages) from None
        return valid_from


@admin.register(ModelPrice)
class ModelPriceAdmin(NamesModels, OurAdmin):
    form = PriceForm
    list_display = (
        "model",
        "valid_from",
        "input_microusd_per_mtok",
        "cached_input_microusd_per_mtok",
        "output_microusd_per_mtok",
    )
    list_filter = ("model",)
    search_fields = ("model",)
    fields = list_display

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {"valid_from": timezone.now()}

    def save_model(self, request: HttpRequest, obj: ModelPrice, form: Any, change: bool) -> None:
        saved = set_model_price(
            actor=actor_of(request),
            model=obj.model,
            valid_from=obj.valid_from,
            input_microusd_per_mtok=obj.input_microusd_per_mtok,
            cached_input_microusd_per_mtok=obj.cached_input_microusd_per_mtok,
            output_microusd_per_mtok=obj.output_microusd_per_mtok,
        )
        obj.pk, obj.public_id = saved.pk, saved.public_id

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
