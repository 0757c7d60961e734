"""The console's form of a key: what it is for, what it is bound to, what it may take at most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from ipaddress import ip_network
from typing import Any, ClassVar, Final

from django import forms
from django.core.exceptions import ValidationError

from inference.fleet import models_to_ask_for
from tenants.models import ApiKey, Project, Tenant, Tier
from tenants.principal import Scope
from tenants.principal_selectors import tiers_open_to
from tenants.services import KeyLimit, key_limits

_MICRO: Final = 1_000_000
_AMOUNT_MAX: Final = 10**12
_NETWORKS_MAX: Final = 100
WAIT: Final = "wait"
SCOPES: Final = {
    Scope.INFERENCE: "Run models",
    Scope.USAGE_READ: "Read usage and cost",
    Scope.KEYS_WRITE: "Issue and revoke keys",
    Scope.ADMIN: "All of these, manage projects, the limits of keys and webhooks, and read the audit log",
}
"""What a key may do, as its makers read it. Who may make keys may do all of that themselves (tenants/rights.py)."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a tenant's keys can be bound to."""

    projects: list[Project]
    tiers: list[Tier]
    models: list[str]

    @classmethod
    def of(cls, tenant: Tenant) -> Choices:
        projects = list(Project.objects.for_tenant(tenant))
        return cls(projects, tiers_open_to(tenant), models_to_ask_for(tenant))


class KeyForm(forms.Form):
    name = forms.CharField(
        max_length=120,
        label="Name",
        widget=forms.TextInput(
            attrs={"placeholder": "For instance: support bot, production", "autocomplete": "off"}
        ),
    )
    project = forms.ChoiceField(label="Project", required=False)
    max_tier = forms.ChoiceField(
        label="Tier", required=False, help_text="A later tier waits longer and leaves room to others."
    )
    allowed_models = forms.MultipleChoiceField(
        label="Models",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="None ticked: all models, those to come included. A model comes with its adapters.",
    )
    allowed_networks = forms.CharField(
        label="Networks",
        required=False,
        max_length=4000,
        widget=forms.Textarea(attrs={"rows": 2, "placeholder": "192.0.2.0/24", "spellcheck": "false"}),
        help_text="Addresses or networks that it may be used from, one per line. Empty: from anywhere.",
    )
    over_a_rate = forms.ChoiceField(
        label="Over a rate",
        required=False,
        choices=[("", "Refuse, and say when"), (WAIT, "Wait in line")],
        help_text="In line until there is room, up to the deadline. A spent budget refuses all the same.",
    )
    requests_per_minute = forms.IntegerField(
        label="Requests per minute", required=False, min_value=1, max_value=_AMOUNT_MAX
    )
    tokens_per_minute = forms.IntegerField(
        label="Tokens per minute", required=False, min_value=1, max_value=_AMOUNT_MAX
    )
    requests_at_once = forms.IntegerField(
        label="Requests at once", required=False, min_value=1, max_value=_AMOUNT_MAX
    )
    cost_per_month = forms.DecimalField(
        label="Budget per month, USD",
        required=False,
        min_value=Decimal("0.000001"),
        max_value=Decimal(_AMOUNT_MAX) / _MICRO,
        max_digits=14,
        decimal_places=6,
    )

    MAIN: ClassVar[tuple[str, ...]] = ("name", "project")
    BOUNDS: ClassVar[tuple[str, ...]] = ("max_tier", "allowed_models", "allowed_networks", "over_a_rate")
    LIMITS = tuple(kind.value for kind in KeyLimit)

    def __init__(self, choices: Choices, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._choices = choices
        own, *later = choices.tiers
        self._choose("project", [("", "None"), *((str(row.public_id), row.name) for row in choices.projects)])
        self._choose(
            "max_tier", [("", f"{own.name}, as the tenant"), *((row.name, row.name) for row in later)]
        )
        bound = (
            [*choices.models, *self.get_initial_for_field(self.fields["allowed_models"], "allowed_models")]
            if self.initial.get("allowed_models")
            else choices.models
        )
        self._choose("allowed_models", [(name, name) for name in dict.fromkeys(bound)])

    def _choose(self, field: str, choices: Iterable[tuple[str, str]]) -> None:
        self.fields[field].choices = list(choices)  # type: ignore[attr-defined]  # each is a ChoiceField

    @classmethod
    def of_key(cls, api_key: ApiKey, choices: Choices, data: Any = None) -> KeyForm:
        limits: dict[str, Any] = {kind.value: amount for kind, amount in key_limits(api_key).items()}
        if (cost := limits.get(KeyLimit.COST_PER_MONTH)) is not None:
            limits[KeyLimit.COST_PER_MONTH] = (Decimal(cost) / _MICRO).normalize()
        initial = {
            "name": api_key.name,
            "project": "" if api_key.project is None else str(api_key.project.public_id),
            "max_tier": "" if api_key.max_tier is None else api_key.max_tier.name,
            "allowed_models": api_key.allowed_models,
            "allowed_networks": "\n".join(api_key.allowed_networks),
            "over_a_rate": WAIT if api_key.waits_for_rate else "",
            **limits,
        }
        return cls(choices, data, initial=initial)

    def clean_allowed_networks(self) -> list[str]:
        networks = self.cleaned_data["allowed_networks"].replace(",", "\n").split()
        if len(networks) > _NETWORKS_MAX:
            raise ValidationError(f"At most {_NETWORKS_MAX} networks.")
        try:
            return [str(ip_network(network)) for network in networks]
        except ValueError as error:
            raise ValidationError(f"Not a network such as 192.0.2.0/24: {error}.") from None

    def bounds(self) -> dict[str, Any]:
        """The arguments of issue_api_key and change_api_key. Only on a valid form, as the rest."""
        chosen = self.cleaned_data
        projects = {str(row.public_id): row for row in self._choices.projects}
        tiers = {row.name: row for row in self._choices.tiers}
        return {
            "name": chosen["name"],
            "project": projects.get(chosen["project"]),
            "max_tier": tiers.get(chosen["max_tier"]),
            "allowed_models": chosen["allowed_models"],
            "allowed_networks": chosen["allowed_networks"],
            "waits_for_rate": chosen["over_a_rate"] == WAIT,
        }

    def limits(self) -> dict[KeyLimit, int | None]:
        wanted: dict[KeyLimit, int | None] = {kind: self.cleaned_data[kind.value] for kind in KeyLimit}
        cost = self.cleaned_data[KeyLimit.COST_PER_MONTH.value]
        wanted[KeyLimit.COST_PER_MONTH] = None if cost is None else int(cost * _MICRO)
        return wanted

    @property
    def main_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.MAIN if name != "project" or self._choices.projects]

    @property
    def bound_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.BOUNDS if name != "max_tier" or len(self._choices.tiers) > 1]

    @property
    def limit_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.LIMITS]

    @property
    def has_more_errors(self) -> bool:
        """In what is folded away at first."""
        return bool(set(self.errors) - {"name", "lifetime"})


class NewKeyForm(KeyForm):
    MAIN: ClassVar[tuple[str, ...]] = ("name", "lifetime", "project")
    BOUNDS: ClassVar[tuple[str, ...]] = ("scopes", *KeyForm.BOUNDS)

    lifetime = forms.TypedChoiceField(
        label="Ends",
        coerce=int,
        choices=[(0, "Never"), (30, "In 30 days"), (90, "In 90 days"), (365, "In a year")],
        initial=0,
    )
    scopes = forms.MultipleChoiceField(
        label="It may",
        required=False,
        choices=[(scope.value, words) for scope, words in SCOPES.items()],
        initial=[Scope.INFERENCE.value],
        widget=forms.CheckboxSelectMultiple,
    )

    def clean_scopes(self) -> list[Scope]:
        return [Scope(scope) for scope in self.cleaned_data["scopes"]] or [Scope.INFERENCE]

    def expires_at(self, now: datetime) -> datetime | None:
        days: int = self.cleaned_data["lifetime"]
        return now + timedelta(days=days) if days else None
