"""The first run: from an empty installation to a curl that answers. Shown until there is a tenant with a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from allauth.account.utils import perform_login
from asgiref.sync import async_to_sync
from django import forms
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from inference.fleet import chat_models
from inference.services.model_check import PROMPT_MAX, Checked, check_model
from inference.views import api_example
from tenants.client_address import client_address
from tenants.member_views import NewPersonForm
from tenants.models import Tier, User
from tenants.principal_selectors import tier_spec
from tenants.row_security import bind_operator
from tenants.selectors import default_tier
from tenants.services import Actor, issue_api_key
from tenants.services.first_run import (
    Setup,
    SetupClosed,
    check_setup_token,
    create_first_operator,
    create_first_tenant,
    read_setup,
    setup_command,
)

_ANSWERED = "setup_model_answered"
"""Session key: a model answered this operator's test prompt."""


class OperatorForm(NewPersonForm):
    field_order = ("email",)
    email = forms.EmailField(
        label="E-mail address", widget=forms.EmailInput(attrs={"autocomplete": "username", "autofocus": True})
    )


class TenantForm(forms.Form):
    name = forms.CharField(
        label="Name", max_length=120, widget=forms.TextInput(attrs={"autocomplete": "organization"})
    )
    tier = forms.ModelChoiceField(
        label="Tier",
        queryset=Tier.objects.order_by("rank"),
        empty_label=None,
        to_field_name="name",
        help_text="Its place in the queue. It can be changed at any time.",
    )


class KeyForm(forms.Form):
    name = forms.CharField(
        label="Name", max_length=120, initial="first key", help_text="After the program that will use it."
    )


class PromptForm(forms.Form):
    model = forms.ChoiceField(label="Model")
    prompt = forms.CharField(label="Prompt", max_length=PROMPT_MAX, initial="Why is the sky blue?")

    def __init__(self, data: Any, models: list[str]) -> None:
        super().__init__(data)
        self.fields["model"].choices = [(name, name) for name in models]  # type: ignore[attr-defined]


def _operators(view: Callable[[HttpRequest, Setup], HttpResponse]) -> Callable[..., HttpResponse]:
    """Of this installation, until it is set up; to others there is no such page."""

    @never_cache
    @login_required
    @wraps(view)
    def page(request: HttpRequest) -> HttpResponse:
        if not cast(User, request.user).is_superuser:
            raise Http404
        bind_operator()
        setup = read_setup()
        return redirect("home") if setup.is_done else view(request, setup)

    return page


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def first_operator(request: HttpRequest, token: str) -> HttpResponse:
    """What the link of `weir up` and of `manage.py setup_link` opens."""
    form = OperatorForm(request.POST or None)
    try:
        check_setup_token(token)
        if request.method != "POST" or not form.is_valid():
            return render(request, "inference/setup_operator.html", {"form": form})
        operator = create_first_operator(token=token, ip_address=client_address(request), **form.cleaned_data)
    except SetupClosed:
        return render(request, "inference/setup_closed.html", {"command": setup_command()}, status=410)
    except ValidationError as error:
        form.add_error(None, error)
        return render(request, "inference/setup_operator.html", {"form": form})
    return cast(HttpResponse, perform_login(request, operator, redirect_url="/setup/"))


@_operators
@require_safe
def setup(request: HttpRequest, setup: Setup) -> HttpResponse:
    return _page(request, setup)


@_operators
@require_POST
def ask_model(request: HttpRequest, setup: Setup) -> HttpResponse:
    """A prompt through the queue to a worker, before there is a tenant."""
    form = PromptForm(request.POST, chat_models())
    if not form.is_valid():
        return _page(request, setup, prompt_form=form)
    tier = Tier.objects.order_by("rank")[0]
    checked = async_to_sync(check_model)(
        form.cleaned_data["model"], form.cleaned_data["prompt"], tier_spec(tier)
    )
    if not checked.trouble:
        request.session[_ANSWERED] = True
    return _page(request, setup, prompt_form=form, checked=checked)


@_operators
@require_POST
def first_tenant(request: HttpRequest, setup: Setup) -> HttpResponse:
    form = TenantForm(request.POST)
    if form.is_valid():
        try:
            create_first_tenant(actor=_actor(request), owner=cast(User, request.user), **form.cleaned_data)
        except SetupClosed:
            pass  # another tab was first: the page shows what is there
        except ValidationError as error:
            form.add_error("name", error.messages)
    if form.errors:
        return _page(request, setup, tenant_form=form)
    return redirect("setup")


@_operators
@require_POST
def first_key(request: HttpRequest, setup: Setup) -> HttpResponse:
    """Its answer is the only page that ever shows the secret."""
    form = KeyForm(request.POST)
    if setup.tenant is None:
        return redirect("setup")
    if form.is_valid():
        try:
            issued = issue_api_key(actor=_actor(request), tenant=setup.tenant, name=form.cleaned_data["name"])
        except ValidationError as error:
            form.add_error("name", error.messages)
        else:
            context = {"tenant": setup.tenant, "secret": issued.secret, **api_example(request)}
            return render(request, "inference/setup_done.html", context)
    return _page(request, setup, key_form=form)


def _page(
    request: HttpRequest,
    setup: Setup,
    *,
    prompt_form: PromptForm | None = None,
    checked: Checked | None = None,
    tenant_form: TenantForm | None = None,
    key_form: KeyForm | None = None,
) -> HttpResponse:
    models = chat_models()
    context = {
        "tenant": setup.tenant,
        "models": models,
        "prompt_form": prompt_form or PromptForm(None, models),
        "checked": checked,
        "has_answered": _ANSWERED in request.session,
        "tenant_form": tenant_form or TenantForm(initial={"tier": default_tier()}),
        "key_form": key_form or KeyForm(),
    }
    return render(request, "inference/setup.html", context)


def _actor(request: HttpRequest) -> Actor:
    return Actor.person(cast(User, request.user), ip_address=client_address(request))
