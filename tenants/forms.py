"""Forms of the console."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from allauth.account.forms import LoginForm
from django import forms


class SignInForm(LoginForm):  # type: ignore[misc]  # allauth is untyped
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["login"].label = "E-mail address"
        self.fields["password"].help_text = ""  # the page has the link
        for name, autocomplete in (("login", "username"), ("password", "current-password")):
            attrs = self.fields[name].widget.attrs
            attrs.pop("placeholder", None)
            attrs["autocomplete"] = autocomplete


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
