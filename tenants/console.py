"""Who sits at the console and which tenant the page is about: resolved once, before any view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast
from uuid import UUID

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.contrib.sessions.backends.base import SessionBase
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.functional import SimpleLazyObject

from tenants.models import Membership, Role, Tenant, User
from tenants.principal import Principal, Scope
from tenants.principal_selectors import member_principal
from tenants.rights import RIGHTS, SCOPES_BY_ROLE, Right
from tenants.row_security import NOBODY_YET, bind_tenant, bound_to
from tenants.support import visit_of

_P = ParamSpec("_P")

_LAST_TENANT = "console_tenant"
"""Session key: the tenant that this person looked at last, where the next visit begins."""


_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Console:
    """A member, at one of their tenants."""

    user: User
    membership: Membership
    memberships: tuple[Membership, ...]
    """All of this person's, by the tenant's name."""
    support_until: datetime | None = None
    """An operator who looks for support, and does not belong to it: until then."""

    @property
    def tenant(self) -> Tenant:
        return self.membership.tenant

    @property
    def others(self) -> list[Membership]:
        return [membership for membership in self.memberships if membership != self.membership]

    @property
    def role(self) -> Role:
        return Role(self.membership.role)

    @property
    def scopes(self) -> frozenset[Scope]:
        """What the role allows."""
        return SCOPES_BY_ROLE[self.role]

    @property
    def may_manage_keys(self) -> bool:
        return Scope.KEYS_WRITE in self.scopes

    @property
    def may_administer(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def may_chat(self) -> bool:
        return Scope.INFERENCE in self.scopes

    @property
    def may_delete_tenant(self) -> bool:
        return Right.DELETE_TENANT in RIGHTS[self.role]

    @property
    def may_export_data(self) -> bool:
        return Right.EXPORT_DATA in RIGHTS[self.role]

    def principal(self) -> Principal:
        """This member as the rest of the product knows them. Takes a query for the limits."""
        return member_principal(self.membership, self.user)


def memberships_of(user: User) -> tuple[Membership, ...]:
    """A person's memberships with tenant and tier, in one query."""
    rows = user.memberships.select_related("tenant__tier").order_by("tenant__name", "id")
    with bound_to(NOBODY_YET):  # all of them, whichever this page is about
        return tuple(rows)


def open_console(request: HttpRequest, tenant_public_id: UUID) -> Console:
    """The console of one tenant. To those who don't belong to it, it does not exist: Http404."""
    console = console_of(cast(User, request.user), request.session, tenant_public_id)
    if console.support_until is None and request.session.get(_LAST_TENANT) != str(tenant_public_id):
        request.session[_LAST_TENANT] = str(tenant_public_id)
    return console


def console_of(user: User, session: SessionBase, tenant_public_id: UUID) -> Console:
    """The same, for who is no HTTP request."""
    memberships = memberships_of(user)
    for membership in memberships:
        if membership.tenant.public_id == tenant_public_id:
            bind_tenant(membership.tenant_id)
            return Console(user, membership, memberships)
    visit = visit_of(user, session)
    if visit is not None and visit.tenant_public_id == tenant_public_id:
        tenant = Tenant.objects.select_related("tier").get(public_id=tenant_public_id)
        bind_tenant(tenant.pk)
        as_viewer = Membership(tenant=tenant, user=user, role=Role.VIEWER)
        return Console(user, as_viewer, memberships, support_until=visit.until)
    raise Http404


def last_console(request: HttpRequest) -> Console | None:
    """The console that this person used last, else their first; None when signed out or in no tenant."""
    if not request.user.is_authenticated:
        return None
    memberships = memberships_of(request.user)
    last = request.session.get(_LAST_TENANT)
    for membership in memberships:
        if str(membership.tenant.public_id) == last:
            return Console(request.user, membership, memberships)
    return Console(request.user, memberships[0], memberships) if memberships else None


def about_the_visitor(request: HttpRequest) -> dict[str, Any]:
    """For every template: the console that a person came from, for pages that are about no tenant."""
    return {
        "last_console": SimpleLazyObject(lambda: last_console(request)),
        "mail_is_sent": settings.MAIL_IS_SENT,
    }


def tenant_page(
    view: Callable[Concatenate[HttpRequest, Console, _P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, UUID, _P], HttpResponse]:
    """A view of a tenant's page: signed in, a member of the tenant in the URL, and never kept by a cache."""

    @login_required
    @wraps(view)
    def page(request: HttpRequest, tenant_id: UUID, *args: _P.args, **kwargs: _P.kwargs) -> HttpResponse:
        console = open_console(request, tenant_id)
        if console.support_until is not None and request.method not in _READING:
            raise PermissionDenied
        response = view(request, console, *args, **kwargs)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    return cast(Callable[Concatenate[HttpRequest, UUID, _P], HttpResponse], page)
