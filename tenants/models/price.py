"""What a model's tokens cost, and from when. A price that has come into force never changes (a trigger)."""

from __future__ import annotations

import uuid_utils.compat
from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q

PRICE_MAX = 1_000_000_000_000
"""A million USD per million tokens: keeps the cost of any request well inside 64 bits."""


def _amount(what: str) -> models.PositiveBigIntegerField[int, int]:
    return models.PositiveBigIntegerField(
        f"{what} (micro-USD per million tokens)", validators=[MaxValueValidator(PRICE_MAX)]
    )


class ModelPrice(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    model = models.CharField(max_length=200)
    """The name that clients use."""
    valid_from = models.DateTimeField(help_text="Holds for requests accepted from then on.")
    input_microusd_per_mtok = _amount("input")
    cached_input_microusd_per_mtok = _amount("cached input")
    output_microusd_per_mtok = _amount("output")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "-valid_from"]
        constraints = [
            # Serves as well the look-up of a model's prices.
            models.UniqueConstraint(fields=["model", "valid_from"], name="model_price_once_per_moment"),
            models.CheckConstraint(condition=~Q(model=""), name="model_price_names_a_model"),
            models.CheckConstraint(
                condition=Q(
                    input_microusd_per_mtok__lte=PRICE_MAX,
                    cached_input_microusd_per_mtok__lte=PRICE_MAX,
                    output_microusd_per_mtok__lte=PRICE_MAX,
                ),
                name="model_price_in_range",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} from {self.valid_from:%Y-%m-%d %H:%M}"
