"""The console's form of a limit to try: what it counts, how much of it in which time, and against whose traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from django import forms

from inference.services.try_limit import DAYS_MAX
from tenants.principal import Calendar, LimitMetric

_MICRO: Final = 1_000_000
_AMOUNT_MAX: Final = 10**12
_METRICS: Final = {
    LimitMetric.REQUESTS: "Requests",
    LimitMetric.TOKENS: "Tokens",
    LimitMetric.INPUT_TOKENS: "Input tokens",
    LimitMetric.OUTPUT_TOKENS: "Output tokens",
    LimitMetric.CONCURRENCY: "Requests at once",
    LimitMetric.COST: "Cost, USD",
}
_RATES: Final = {"1": "a second", "60": "a minute", "3600": "an hour", "86400": "24 hours"}
_BUDGETS: Final = {Calendar.DAY.value: "a day, as a budget", Calendar.MONTH.value: "a month, as a budget"}


class LimitForm(forms.Form):
    metric = forms.ChoiceField(label="Limit", choices=[(each.value, name) for each, name in _METRICS.items()])
    amount = forms.DecimalField(
        label="At most", min_value=Decimal("0.000001"), max_value=_AMOUNT_MAX, max_digits=19, decimal_places=6
    )
    per = forms.ChoiceField(label="In", choices=[*_RATES.items(), *_BUDGETS.items()], initial="60")
    days = forms.IntegerField(label="Days of traffic", min_value=1, max_value=DAYS_MAX, initial=7)
    model = forms.ChoiceField(label="Model", required=False)
    key = forms.ChoiceField(label="Key", required=False)

    def __init__(self, models: Sequence[str], keys: Mapping[UUID, str], data: Any = None) -> None:
        super().__init__(data, auto_id="try-%s")
        named = sorted(keys.items(), key=lambda item: item[1].lower())
        for field, choices in (
            ("model", [("", "All"), *((name, name) for name in models)]),
            ("key", [("", "All, and the chat"), *((str(public_id), name) for public_id, name in named)]),
        ):
            self.fields[field].choices = choices  # type: ignore[attr-defined]  # each is a ChoiceField

    def clean(self) -> dict[str, Any]:
        """The amount in the limit's own unit: micro-USD, or things that come whole."""
        chosen = self.cleaned_data
        if (amount := chosen.get("amount")) is not None:
            in_units = amount * _MICRO if chosen.get("metric") == LimitMetric.COST else amount
            if in_units != int(in_units) or not 1 <= in_units <= _AMOUNT_MAX:
                self.add_error("amount", "A whole number, please.")
            chosen["amount"] = int(in_units)
        return chosen

    def limit(self) -> dict[str, Any]:
        """The arguments of proposed_limit. Only on a valid form, as the next."""
        per = self.cleaned_data["per"]
        return {
            "metric": self.cleaned_data["metric"],
            "amount": self.cleaned_data["amount"],
            "period_s": int(per) if per in _RATES else 0,
            "burst": None,
            "calendar": per if per in _BUDGETS else None,
        }

    def traffic(self) -> dict[str, Any]:
        key = self.cleaned_data["key"]
        return {
            "days": self.cleaned_data["days"],
            "model": self.cleaned_data["model"],
            "key": UUID(key) if key else None,
        }
