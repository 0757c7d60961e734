"""Forms of the console."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm


class SignInForm(AuthenticationForm):
    error_messages = {
        "invalid_login": "That e-mail address and password do not match an account.",
        "inactive": "This account is switched off. Ask the operator of this installation.",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].label = "E-mail address"
        self.fields["username"].widget.input_type = "email"
        self.fields["username"].widget.attrs["autocomplete"] = "username"


class NewKeyForm(forms.Form):
    name = forms.CharField(
        max_length=120,
        label="Name",
        widget=forms.TextInput(
            attrs={"placeholder": "For instance: support bot, production", "autocomplete": "off"}
        ),
    )
    lifetime = forms.TypedChoiceField(
        label="Ends",
        coerce=int,
        choices=[(0, "Never"), (30, "In 30 days"), (90, "In 90 days"), (365, "In a year")],
        initial=0,
    )

    def expires_at(self, now: datetime) -> datetime | None:
        """Only on a valid form."""
        days: int = self.cleaned_data["lifetime"]
        return now + timedelta(days=days) if days else None
