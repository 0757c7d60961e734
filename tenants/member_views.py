"""The console's page of members and invitations, and the page that an invitation's link opens."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from allauth.account.utils import perform_login
from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from tenants.client_address import client_address
from tenants.confirmation import Question, ask_first
from tenants.console import Console, tenant_page
from tenants.members import get_invitation, get_membership, list_invitations, member_page
from tenants.models import Invitation, Membership, Role, User
from tenants.rights import RIGHTS, Right, may_give
from tenants.services import Actor
from tenants.services.invitations import (
    AccountExists,
    InvitationClosed,
    WrongPerson,
    accept_as_new_person,
    accept_invitation,
    find_invitation,
    invitation_link,
    invite_member,
    resend_invitation,
    revoke_invitation,
)
from tenants.services.members import LastOwner, NotAllowedToManage, change_role, remove_member


class InviteForm(forms.Form):
    email = forms.EmailField(label="E-mail address", widget=forms.EmailInput(attrs={"autocomplete": "off"}))
    role = forms.TypedChoiceField(label="Role", coerce=Role)

    def __init__(self, *args: Any, by: Role, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["role"].choices = [(role.value, role.label) for role in _givable(by)]  # type: ignore[attr-defined]
        self.fields["role"].initial = Role.DEVELOPER


class NewPersonForm(forms.Form):
    password = forms.CharField(
        label="Password",
        strip=False,
        max_length=200,
        help_text="At least ten characters.",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def members(request: HttpRequest, console: Console) -> HttpResponse:
    """Who belongs to the tenant and who is invited; a POST invites."""
    if request.method != "POST":
        return _members_page(request, console, InviteForm(by=console.role))
    _require_manager(console)
    form = InviteForm(request.POST, by=console.role)
    if not form.is_valid():
        return _members_page(request, console, form)
    try:
        invitation = invite_member(
            actor=_actor(request, console),
            by=console.role,
            tenant=console.tenant,
            email=form.cleaned_data["email"],
            role=form.cleaned_data["role"],
        )
    except ValidationError as error:
        form.add_error("email", error)
        return _members_page(request, console, form)
    told = "and gets a mail with the link" if settings.MAIL_IS_SENT else "copy the link below and pass it on"
    messages.success(request, f"{invitation.email} is invited: {told}.")
    return redirect("members", console.tenant.public_id)


@require_POST
@tenant_page
def member_role(request: HttpRequest, console: Console, member_id: UUID) -> HttpResponse:
    membership = _member(console, member_id)
    _require_manager(console)
    try:
        role = Role(request.POST.get("role", ""))
    except ValueError:
        raise Http404 from None
    try:
        if change_role(actor=_actor(request, console), by=console.role, membership=membership, role=role):
            messages.success(request, f"{membership.user.email} is {role.label.lower()} from now on.")
    except (LastOwner, NotAllowedToManage) as error:
        messages.error(request, str(error))
    return redirect("members", console.tenant.public_id)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def remove(request: HttpRequest, console: Console, member_id: UUID) -> HttpResponse:
    """Asks first, then removes. One's own row is how one leaves."""
    membership = _member(console, member_id)
    leaves = membership == console.membership
    if not leaves:
        _require_manager(console)
    if request.method != "POST":
        who, name = ("You", "you") if leaves else ("They", "they")
        question = Question(
            f"Leave {console.tenant.name}?" if leaves else f"Remove {membership.user.email}?",
            f"{who} will not see this tenant any more. Keys that {name} made go on working: revoke those that are "
            "known to nobody else.",
            "Leave" if leaves else "Remove",
            keep="Stay" if leaves else "Keep them",
        )
        return ask_first(request, console, question, section="members", back=_list_of(console))
    try:
        remove_member(actor=_actor(request, console), by=console.role, membership=membership)
    except (LastOwner, NotAllowedToManage) as error:
        messages.error(request, str(error))
        return redirect("members", console.tenant.public_id)
    messages.success(request, f"{membership.user.email} is no longer a member of {console.tenant.name}.")
    return redirect("home") if leaves else redirect("members", console.tenant.public_id)


@require_POST
@tenant_page
def invitation_again(request: HttpRequest, console: Console, invitation_id: UUID) -> HttpResponse:
    return _with_invitation(request, console, invitation_id, resend_invitation, "has a new link")


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page
def invitation_revoked(request: HttpRequest, console: Console, invitation_id: UUID) -> HttpResponse:
    """Asks first, then revokes."""
    if request.method != "POST":
        found = _invitation(console, invitation_id)
        _require_manager(console)
        question = Question(
            f"Revoke the invitation of {found.email}?",
            "Its link stops working at once. The address can be invited again.",
            "Revoke invitation",
        )
        return ask_first(request, console, question, section="members", back=_list_of(console))
    return _with_invitation(request, console, invitation_id, revoke_invitation, "is not invited any more")


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def invitation(request: HttpRequest, public_id: UUID, token: str) -> HttpResponse:
    """What the link of an invitation opens. Only a POST accepts: programs that check mail follow links."""
    try:
        found = find_invitation(public_id, token)
    except InvitationClosed:
        return render(request, "tenants/invitation_closed.html", status=410)
    signed_in = request.user if request.user.is_authenticated else None
    context = {
        "invitation": found,
        "form": NewPersonForm(),
        "is_theirs": signed_in is not None and signed_in.email == found.email,
        "has_account": User.objects.filter(email=found.email).exists(),
    }
    if request.method != "POST":
        return render(request, "tenants/invitation.html", context)
    try:
        if signed_in is not None:
            actor = Actor.person(signed_in, ip_address=client_address(request))
            accept_invitation(actor=actor, public_id=public_id, token=token, user=signed_in)
            return redirect("overview", found.tenant.public_id)
        form = NewPersonForm(request.POST)
        context["form"] = form
        if not form.is_valid():
            return render(request, "tenants/invitation.html", context)
        membership = accept_as_new_person(
            public_id=public_id,
            token=token,
            password=form.cleaned_data["password"],
            ip_address=client_address(request),
        )
    except InvitationClosed:
        return render(request, "tenants/invitation_closed.html", status=410)
    except (AccountExists, WrongPerson):
        return render(request, "tenants/invitation.html", {**context, "has_account": True}, status=403)
    except ValidationError as error:
        form.add_error("password", error)
        return render(request, "tenants/invitation.html", context)
    response = perform_login(request, membership.user, redirect_url=f"/t/{found.tenant.public_id}/")
    return cast(HttpResponse, response)


def _members_page(request: HttpRequest, console: Console, form: InviteForm) -> HttpResponse:
    may_manage = Right.MANAGE_MEMBERS in RIGHTS[console.role]
    page = member_page(
        console.tenant,
        search=request.GET.get("q", "").replace("\0", "").strip()[:254],
        after=request.GET.get("after", ""),
    )
    rows = [
        {
            "membership": membership,
            "is_me": membership == console.membership,
            "may_change": may_give(console.role, Role(membership.role)),
        }
        for membership in page.members
    ]
    invited = list_invitations(console.tenant) if may_manage else []
    return render(
        request,
        "tenants/members.html",
        {
            "console": console,
            "section": "members",
            "form": form,
            "rows": rows,
            "page": page,
            "invited": [(row, _link(console, row)) for row in invited],
            "may_manage": may_manage,
            "roles": _givable(console.role),
            "rights": [(right, [role.label for role in Role if right in RIGHTS[role]]) for right in Right],
            "now": timezone.now(),
        },
    )


def _link(console: Console, invitation: Invitation) -> str:
    """The link to pass on by hand, where no mail is sent and whoever looks could have made it."""
    shown = not settings.MAIL_IS_SENT and may_give(console.role, Role(invitation.role))
    return invitation_link(invitation) if shown else ""


def _with_invitation(
    request: HttpRequest, console: Console, invitation_id: UUID, work: Any, words: str
) -> HttpResponse:
    found = _invitation(console, invitation_id)
    _require_manager(console)
    try:
        if work(actor=_actor(request, console), by=console.role, invitation=found):
            messages.success(request, f"{found.email} {words}.")
    except NotAllowedToManage as error:
        messages.error(request, str(error))
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    return redirect("members", console.tenant.public_id)


def _givable(by: Role) -> list[Role]:
    return [role for role in Role if may_give(by, role)]


def _member(console: Console, member_id: UUID) -> Membership:
    membership = get_membership(console.tenant, member_id)
    if membership is None:
        raise Http404
    return membership


def _invitation(console: Console, invitation_id: UUID) -> Invitation:
    found = get_invitation(console.tenant, invitation_id)
    if found is None:
        raise Http404
    return found


def _list_of(console: Console) -> str:
    return reverse("members", args=[console.tenant.public_id])


def _require_manager(console: Console) -> None:
    if Right.MANAGE_MEMBERS not in RIGHTS[console.role]:
        raise PermissionDenied


def _actor(request: HttpRequest, console: Console) -> Actor:
    return Actor.person(console.user, ip_address=client_address(request))
