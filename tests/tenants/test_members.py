"""Members and invitations: who may do what to whom, links that work once, and never a tenant without an owner."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from allauth.account.models import EmailAddress
from django.core import mail
from django.core.exceptions import ValidationError
from django.db import connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from tenants.models import AuditEntry, Invitation, Membership, Role, Tenant, User
from tenants.principal import Scope
from tenants.rights import RIGHTS, SCOPES_BY_ROLE, Right
from tenants.services import Actor, add_member, suspend_tenant
from tenants.services.invitations import (
    InvitationClosed,
    accept_invitation,
    invitation_link,
    invite_member,
    mail_invitations,
    resend_invitation,
)
from tenants.services.members import LastOwner, NotAllowedToManage, change_role, remove_member
from tests.factories import TEST, Cast, make_user, signed_in

pytestmark = pytest.mark.django_db
_addresses = (f"198.51.100.{number}" for number in count(1))


def membership(tenant: Tenant, user: User) -> Membership:
    return Membership.objects.get(tenant=tenant, user=user)


def with_role(cast: Cast, role: Role) -> User:
    user = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=user, role=role)
    return user


def invited(cast: Cast, email: str, role: Role = Role.DEVELOPER) -> Invitation:
    return invite_member(
        actor=Actor.person(cast.owner), by=Role.OWNER, tenant=cast.tenant, email=email, role=role
    )


def path_of(invitation: Invitation) -> str:
    return "/" + invitation_link(invitation).split("/", 3)[3]


def test_the_table_of_rights_is_the_one_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "tenancy.md").read_text()
    documented = {}
    for right, *cells in re.findall(r"^\| ([a-z][^|]+?) \|" + r" ([^|]*) \|" * len(Role) + "$", text, re.M):
        documented[right] = {role for role, cell in zip(Role, cells, strict=True) if cell.strip() == "yes"}
    assert documented == {right.value: {role for role in Role if right in RIGHTS[role]} for right in Right}
    # What a session may do is what a key could: nobody who can't manage keys has their scope.
    for role in Role:
        assert (Scope.KEYS_WRITE in SCOPES_BY_ROLE[role]) == (Right.MANAGE_KEYS in RIGHTS[role])


@pytest.mark.parametrize("by", list(Role))
def test_who_may_change_and_remove_whom(cast: Cast, by: Role):
    for held in Role:
        for given in Role:
            target = membership(cast.tenant, with_role(cast, held))
            owners_matter = Role.OWNER in (held, given)
            needed = Right.MANAGE_OWNERS if owners_matter else Right.MANAGE_MEMBERS
            if needed in RIGHTS[by]:
                assert change_role(actor=TEST, by=by, membership=target, role=given) == (held is not given)
            else:
                with pytest.raises(NotAllowedToManage):
                    change_role(actor=TEST, by=by, membership=target, role=given)
        target = membership(cast.tenant, with_role(cast, held))
        if (Right.MANAGE_OWNERS if held is Role.OWNER else Right.MANAGE_MEMBERS) in RIGHTS[by]:
            remove_member(actor=TEST, by=by, membership=target)
            assert not Membership.objects.for_tenant(cast.tenant).filter(pk=target.pk).exists()
        else:
            with pytest.raises(NotAllowedToManage):
                remove_member(actor=TEST, by=by, membership=target)


def test_the_last_owner_stays_one(cast: Cast):
    mine = membership(cast.tenant, cast.owner)
    with pytest.raises(LastOwner):
        remove_member(actor=Actor.person(cast.owner), by=Role.OWNER, membership=mine)
    with pytest.raises(LastOwner):
        change_role(actor=Actor.person(cast.owner), by=Role.OWNER, membership=mine, role=Role.ADMIN)
    page = signed_in(cast.owner).post(
        reverse("remove_member", args=[cast.tenant.public_id, mine.public_id]), follow=True
    )
    assert b"needs an owner" in page.content
    # One who can't sign in does not count.
    gone = with_role(cast, Role.OWNER)
    User.objects.filter(pk=gone.pk).update(is_active=False)
    with pytest.raises(LastOwner):
        remove_member(actor=Actor.person(cast.owner), by=Role.OWNER, membership=mine)
    with_role(cast, Role.OWNER)
    remove_member(actor=Actor.person(cast.owner), by=Role.OWNER, membership=mine)


def test_who_is_removed_by_two_at_once_is_removed(cast: Cast):
    member = membership(cast.tenant, with_role(cast, Role.VIEWER))
    for _ in range(2):
        remove_member(actor=Actor.person(cast.owner), by=Role.OWNER, membership=member)
    assert not change_role(actor=Actor.person(cast.owner), by=Role.OWNER, membership=member, role=Role.ADMIN)


def test_the_role_counts_that_one_has_by_now(cast: Cast):
    """Each of two owners demotes the other, on the word of a page that both opened as owners."""
    other = with_role(cast, Role.OWNER)
    with_role(cast, Role.OWNER)
    mine, others = membership(cast.tenant, cast.owner), membership(cast.tenant, other)
    change_role(actor=Actor.person(cast.owner), by=Role.OWNER, membership=others, role=Role.ADMIN)
    with pytest.raises(NotAllowedToManage):
        change_role(actor=Actor.person(other), by=Role.OWNER, membership=mine, role=Role.ADMIN)
    with pytest.raises(NotAllowedToManage):
        remove_member(actor=Actor.person(other), by=Role.OWNER, membership=mine)
    remove_member(actor=Actor.person(cast.owner), by=Role.OWNER, membership=others)
    with pytest.raises(NotAllowedToManage):
        remove_member(actor=Actor.person(other), by=Role.OWNER, membership=mine)


def test_removed_means_out_at_once(cast: Cast):
    developer = signed_in(cast.member)
    home = reverse("overview", args=[cast.tenant.public_id])
    assert developer.get(home).status_code == 200
    admin = signed_in(with_role(cast, Role.ADMIN))
    url = reverse(
        "remove_member", args=[cast.tenant.public_id, membership(cast.tenant, cast.member).public_id]
    )
    assert cast.member.email in admin.get(url, headers={"HX-Request": "true"}).content.decode()
    admin.post(url)
    assert developer.get(home).status_code == 404
    entry = AuditEntry.objects.filter(tenant=cast.tenant, action="member.removed").get()
    assert entry.before == {"user": cast.member.email, "role": "developer"}


def test_roles_on_the_page(cast: Cast):
    url = reverse("members", args=[cast.tenant.public_id])
    role_url = reverse(
        "member_role", args=[cast.tenant.public_id, membership(cast.tenant, cast.member).public_id]
    )
    owner, admin = signed_in(cast.owner), signed_in(with_role(cast, Role.ADMIN))
    assert "Invite someone" in owner.get(url).content.decode()
    viewer = signed_in(with_role(cast, Role.VIEWER)).get(url).content.decode()
    assert cast.owner.email in viewer
    assert "Invite someone" not in viewer
    assert 'value="owner"' not in admin.get(url).content.decode()
    admin.post(role_url, {"role": "owner"})
    assert membership(cast.tenant, cast.member).role == Role.DEVELOPER
    owner.post(role_url, {"role": "owner"})
    assert membership(cast.tenant, cast.member).role == Role.OWNER
    assert owner.post(role_url, {"role": "king"}).status_code == 404


def test_a_new_person_comes_by_mail(cast: Cast, settings: Any):
    settings.MAIL_IS_SENT = True
    owner = signed_in(cast.owner)
    url = reverse("members", args=[cast.tenant.public_id])
    owner.post(url, {"email": "New.Person@example.org", "role": "viewer"})
    assert mail_invitations() == 1
    assert mail_invitations() == 0
    message = mail.outbox[-1]
    assert message.to == ["new.person@example.org"]
    link = re.search(r"http://\S+?(/invitations/\S+)", message.body)
    assert link
    assert link[1] not in owner.get(url).content.decode()  # whoever invites can't accept in their stead

    person = Client(REMOTE_ADDR=next(_addresses))
    page = person.get(link[1])
    assert cast.tenant.name in page.content.decode()
    assert page.headers["Referrer-Policy"] == "same-origin"
    assert not User.objects.filter(email="new.person@example.org").exists()  # a GET accepts nothing
    assert b"too short" in person.post(link[1], {"password": "short"}).content
    assert person.post(link[1], {"password": "a long enough one"}).headers["Location"] == (
        f"/t/{cast.tenant.public_id}/"
    )
    user = User.objects.get(email="new.person@example.org")
    assert membership(cast.tenant, user).role == Role.VIEWER
    assert EmailAddress.objects.get(user=user).verified
    assert person.get(f"/t/{cast.tenant.public_id}/").status_code == 200
    assert person.get(link[1]).status_code == 410  # once
    actions = set(AuditEntry.objects.filter(tenant=cast.tenant).values_list("action", flat=True))
    assert {"invitation.made", "invitation.accepted"} <= actions


def test_someone_with_an_account_accepts_signed_in(cast: Cast):
    guest = make_user()
    link = path_of(invited(cast, guest.email))
    assert b"Sign in with it to join" in Client().get(link).content
    assert Client().post(link, {"password": "a long enough one"}).status_code == 403
    client = signed_in(guest)
    assert b"Join" in client.get(link).content
    assert client.post(link).status_code == 302
    assert membership(cast.tenant, guest).role == Role.DEVELOPER


def test_another_person_can_not_accept(cast: Cast):
    link = path_of(invited(cast, make_user().email))
    page = signed_in(cast.outsider).get(link)
    assert b"but this invitation is for" in page.content
    assert signed_in(cast.outsider).post(link).status_code == 403
    assert not Membership.objects.for_tenant(cast.tenant).filter(user=cast.outsider).exists()


def test_links_that_do_not_work_any_more(cast: Cast):
    guest = make_user()
    first = invited(cast, guest.email)
    old = path_of(first)
    client = signed_in(guest)
    forged = old[:-2] + ("A" if old[-2] != "A" else "B") + "/"
    assert client.get(forged).status_code == 410
    swapped = old.replace(str(first.public_id), str(invited(cast, make_user().email).public_id))
    assert client.get(swapped).status_code == 410

    again = resend_invitation(actor=TEST, by=Role.OWNER, invitation=first)
    assert client.get(old).status_code == 410
    assert client.get(path_of(again)).status_code == 200

    Invitation.objects.for_tenant(cast.tenant).filter(pk=first.pk).update(
        expires_at=timezone.now() - timedelta(seconds=1)
    )
    assert client.post(path_of(again)).status_code == 410
    renewed = resend_invitation(actor=TEST, by=Role.OWNER, invitation=first)

    suspend_tenant(actor=TEST, tenant=cast.tenant)
    assert client.post(path_of(renewed)).status_code == 410
    Tenant.objects.filter(pk=cast.tenant.pk).update(suspended_at=None, suspended_reason="")

    owner = signed_in(cast.owner)
    revoke = reverse("invitation_revoked", args=[cast.tenant.public_id, first.public_id])
    assert "Its link stops working" in owner.get(revoke).content.decode()
    assert client.get(path_of(renewed)).status_code == 200, "it was only asked"
    owner.post(revoke)
    assert client.post(path_of(renewed)).status_code == 410
    assert not Membership.objects.for_tenant(cast.tenant).filter(user=guest).exists()
    with pytest.raises(ValidationError):
        resend_invitation(actor=TEST, by=Role.OWNER, invitation=first)


def test_what_can_not_be_invited(cast: Cast):
    invited(cast, "once@example.org")
    for email in ("once@example.org", "ONCE@example.org ", cast.member.email, "no address"):
        with pytest.raises(ValidationError):
            invited(cast, email)
    with pytest.raises(NotAllowedToManage):
        invite_member(actor=TEST, by=Role.ADMIN, tenant=cast.tenant, email="a@example.org", role=Role.OWNER)
    page = signed_in(with_role(cast, Role.ADMIN)).post(
        reverse("members", args=[cast.tenant.public_id]), {"email": "a@example.org", "role": "owner"}
    )
    assert b'role="alert"' in page.content
    assert not Invitation.objects.for_tenant(cast.tenant).filter(email="a@example.org").exists()


def test_without_mail_the_link_is_shown_to_who_could_make_it(cast: Cast, settings: Any):
    settings.MAIL_IS_SENT = False
    invitation = invited(cast, "by-hand@example.org", Role.OWNER)
    url = reverse("members", args=[cast.tenant.public_id])
    assert path_of(invitation) in signed_in(cast.owner).get(url).content.decode()
    assert path_of(invitation) not in signed_in(with_role(cast, Role.ADMIN)).get(url).content.decode()
    assert mail_invitations() == 0


def test_a_mail_server_that_is_away_loses_no_invitation(cast: Cast, settings: Any, monkeypatch: Any):
    settings.MAIL_IS_SENT = True
    invitation = invited(cast, "later@example.org")
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1  # nobody listens
    assert mail_invitations() == 0
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    assert mail_invitations() == 0  # not at once again
    Invitation.objects.for_tenant(cast.tenant).filter(pk=invitation.pk).update(
        mail_tried_at=timezone.now() - timedelta(minutes=2)
    )
    assert mail_invitations() == 1


def _at_once(*work: Callable[[], Any]) -> list[Any]:
    """Runs these side by side, from one barrier; what each returned or raised."""
    barrier = threading.Barrier(len(work), timeout=60)

    def run(task: Callable[[], Any]) -> Any:
        try:
            barrier.wait()
            return task()
        except (InvitationClosed, LastOwner) as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


@pytest.mark.django_db(transaction=True)
def test_of_two_who_accept_at_once_one_does(cast: Cast):
    guest = make_user()
    actor = Actor.person(guest)
    for _ in range(5):
        Membership.objects.for_tenant(cast.tenant).filter(user=guest).delete()
        invitation = invited(cast, guest.email)
        token = path_of(invitation).rstrip("/").rsplit("/", 1)[1]

        def accept(invitation: Invitation = invitation, token: str = token) -> Membership:
            return accept_invitation(actor=actor, public_id=invitation.public_id, token=token, user=guest)

        ended = _at_once(accept, accept, accept)
        assert sum(isinstance(end, Membership) for end in ended) == 1
    accepted = AuditEntry.objects.filter(tenant=cast.tenant, action="invitation.accepted")
    assert accepted.count() == 5


@pytest.mark.django_db(transaction=True)
def test_of_two_owners_who_leave_at_once_one_stays(cast: Cast):
    def leave(user: User) -> Callable[[], None]:
        mine = membership(cast.tenant, user)
        return lambda: remove_member(actor=Actor.person(user), by=Role.OWNER, membership=mine)

    for _ in range(5):
        owners = [row.user for row in Membership.objects.for_tenant(cast.tenant).filter(role=Role.OWNER)]
        ended = _at_once(*(leave(user) for user in [*owners, with_role(cast, Role.OWNER)]))
        assert sum(isinstance(end, LastOwner) for end in ended) == 1
        assert Membership.objects.for_tenant(cast.tenant).filter(role=Role.OWNER).count() == 1


@pytest.mark.django_db(transaction=True)
def test_control_without_the_lock_both_owners_leave(cast: Cast):
    """The same race with a check and a deletion that nothing holds together: the tenant is orphaned."""
    second = with_role(cast, Role.OWNER)
    checked = threading.Barrier(2, timeout=60)

    def leave(user: User) -> Callable[[], None]:
        def unguarded() -> None:
            owners = Membership.objects.for_tenant(cast.tenant).filter(role=Role.OWNER)
            assert owners.exclude(user=user).exists()
            checked.wait()
            owners.filter(user=user).delete()

        return unguarded

    _at_once(leave(cast.owner), leave(second))
    assert not Membership.objects.for_tenant(cast.tenant).filter(role=Role.OWNER).exists()


def test_hundreds_of_members_are_paged_and_found(cast: Cast, django_assert_max_num_queries: Any):
    people = User.objects.bulk_create(
        User(email=f"person-{n:03}@{cast.tenant.slug}.example") for n in range(120)
    )
    Membership.objects.bulk_create(
        Membership(tenant=cast.tenant, user=person, role=Role.VIEWER) for person in people
    )
    browser = signed_in(cast.owner)
    path = reverse("members", args=[cast.tenant.public_id])
    seen: list[str] = []
    pages = 0
    while path:
        with django_assert_max_num_queries(16):
            html = browser.get(path).content.decode()
        seen += re.findall(r"<strong>([^<]+@[^<]+)</strong>", html)
        following = re.search(r'href="([^"]*after=[^"]*)" rel="next"', html)
        path = reverse("members", args=[cast.tenant.public_id]) + following[1] if following else ""
        pages += 1
    assert pages == 3
    assert len(seen) == len(set(seen)) == 122
    found = browser.get(reverse("members", args=[cast.tenant.public_id]), {"q": "Person-07"}).content.decode()
    assert set(re.findall(r"<strong>([^<]+@[^<]+)</strong>", found)) == {
        person.email for person in people if person.email.startswith("person-07")
    }
    nobody = browser.get(reverse("members", args=[cast.tenant.public_id]), {"q": "nobody", "after": "x"})
    assert "No member with such an address" in nobody.content.decode()
