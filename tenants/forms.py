"""Forms of the console."""

from __future__ import annotations

from typing import Any

from allauth.account.forms import LoginForm


class SignInForm(LoginForm):  # type: ignore[misc]  # allauth is untyped
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["login"].label = "E-mail address"
        self.fields["password"].help_text = ""  # the page has the link
        for name, autocomplete in (("login", "username"), ("password", "current-password")):
            attrs = self.fields[name].widget.attrs
            attrs.pop("placeholder", None)
            attrs["autocomplete"] = autocomplete
