"""Set a model's price from a moment on."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from tenants.models import ModelPrice
from tenants.services.audit import Actor, record_audit

_NOW: Final = timedelta(minutes=1)
"""So far back a moment still counts as now: a form takes a while to fill in."""


def refuse_past(valid_from: datetime) -> None:
    """Raises ValidationError for a moment that has passed."""
    if valid_from < timezone.now() - _NOW:
        raise ValidationError(
            {"valid_from": "This moment has passed: requests were charged already. Adjust them instead."}
        )


@transaction.atomic
def set_model_price(
    *,
    actor: Actor,
    model: str,
    input_microusd_per_mtok: int,
    output_microusd_per_mtok: int,
    cached_input_microusd_per_mtok: int | None = None,
    valid_from: datetime | None = None,
) -> ModelPrice:
    """A new price, from now unless a later moment is given. Cached input costs as input unless given.

    What was charged before stays as it was; to re-rate it, see `adjust_usage`.
    Raises django.core.exceptions.ValidationError for a moment that has passed or a value that won't do.
    """
    valid_from = valid_from or timezone.now()
    refuse_past(valid_from)
    cached = cached_input_microusd_per_mtok
    price = ModelPrice(
        model=model.strip(),
        valid_from=valid_from,
        input_microusd_per_mtok=input_microusd_per_mtok,
        cached_input_microusd_per_mtok=input_microusd_per_mtok if cached is None else cached,
        output_microusd_per_mtok=output_microusd_per_mtok,
    )
    price.full_clean()
    price.save()
    record_audit(
        actor=actor,
        action="price.set",
        tenant=None,
        target=price,
        after={
            "model": price.model,
            "valid_from": price.valid_from,
            "input_microusd_per_mtok": price.input_microusd_per_mtok,
            "cached_input_microusd_per_mtok": price.cached_input_microusd_per_mtok,
            "output_microusd_per_mtok": price.output_microusd_per_mtok,
        },
    )
    return price
