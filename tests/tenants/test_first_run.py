"""An empty installation: one link, one operator, one first tenant, whoever comes at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from tenants.models import AuditEntry, Tenant, User
from tenants.services import Actor, first_run
from tenants.services.first_run import SetupClosed, create_first_operator, create_first_tenant, setup_link
from tests.factories import PASSWORD, make_key, make_operator, make_tenant, make_tier, make_user

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("nobody")]
committed = pytest.mark.django_db(transaction=True)
NEW = {"email": "first@example.org", "password": "a long enough one"}


@pytest.fixture
def nobody() -> None:
    """As the migrations leave an empty installation: files before this one may have emptied all tables."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE tenants_user, tenants_tenant CASCADE")
    for name in ("realtime", "standard", "batch"):
        make_tier(name)


def token() -> str:
    return setup_link().rstrip("/").rsplit("/", 1)[1]


def path() -> str:
    return reverse("setup_operator", args=[token()])


def test_the_link_makes_the_operator_and_signs_in():
    browser = Client(REMOTE_ADDR="192.0.2.9")
    start = browser.get("/").content.decode()
    assert "This installation is new" in start
    assert "python manage.py setup_link</code>" in start
    answer = browser.post(path(), NEW)
    assert (answer.status_code, answer.headers["Location"]) == (302, "/setup/")
    operator = User.objects.get()
    assert operator.is_superuser
    assert browser.get("/setup/").status_code == 200
    entry = AuditEntry.unscoped.get(action="user.created")
    assert (entry.actor_user, entry.ip_address) == (operator, "192.0.2.9")


def test_the_link_opens_nothing_once_there_is_an_operator():
    link = path()
    operator = make_operator()
    for answer in (Client().get(link), Client().post(link, NEW)):
        assert answer.status_code == 410
    operator.is_active = False
    operator.save()
    assert Client().post(link, NEW).status_code == 410, "one that is switched off operates it all the same"
    assert User.objects.count() == 1
    with pytest.raises(CommandError, match="operator already"):
        call_command("setup_link", stdout=StringIO())


def test_no_other_link_opens_anything(monkeypatch):
    link = path()
    forged = link[:-2] + ("A" if link[-2] != "A" else "B") + "/"
    for other in (forged, "/setup/operator/", reverse("setup_operator", args=["operator:1abc:x"])):
        assert Client().post(other, NEW).status_code == 410
    later = timezone.now() + timedelta(hours=first_run.LINK_HOURS, seconds=2)
    monkeypatch.setattr("django.core.signing.time.time", lambda: later.timestamp())
    assert Client().post(link, NEW).status_code == 410
    assert not User.objects.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"password": "short"}, b"too short"),
        ({"email": "nobody"}, b"valid email"),
        ({}, b"account with this"),
    ],
)
def test_what_will_not_do_is_said_and_leaves_no_operator(given, said):
    make_user(NEW["email"])
    answer = Client().post(path(), NEW | {"email": NEW["email"] if not given else "x@example.org"} | given)
    assert said in answer.content
    assert not User.objects.filter(is_superuser=True).exists()


def test_from_operator_to_key_and_then_no_more():
    operator = make_operator()
    browser = Client()
    browser.force_login(operator)
    assert browser.get("/").headers["Location"] == "/setup/"
    assert browser.post("/setup/key/", {"name": "too early"}).headers["Location"] == "/setup/"
    assert b"may not" not in browser.post("/setup/tenant/", {"name": "!!!", "tier": "standard"}).content
    assert not Tenant.objects.exists()
    assert browser.post("/setup/tenant/", {"name": "Acme", "tier": "standard"}).status_code == 302
    page = browser.post("/setup/key/", {"name": "ci"})
    assert page.content.count(b"Bearer wr_live_") == 1
    for name in ("setup", "setup_model", "setup_tenant", "setup_key"):
        answer = (
            browser.get(reverse(name)) if name == "setup" else browser.post(reverse(name), {"name": "again"})
        )
        assert (answer.status_code, answer.headers["Location"]) == (302, "/")
    assert Tenant.objects.count() == 1
    assert "no-store" in page.headers["Cache-Control"]


def test_to_others_there_is_no_such_page():
    make_operator()
    staff = make_user(is_staff=True)
    for person, codes in ((None, {302}), (make_user(), {404}), (staff, {404})):
        browser = Client()
        if person:
            browser.force_login(person)
        assert browser.get("/setup/").status_code in codes
        for name in ("setup_model", "setup_tenant", "setup_key"):
            answer = browser.post(reverse(name), {"name": "mine", "tier": "standard"})
            assert answer.status_code in codes
    assert not Tenant.objects.exists()


def test_an_installation_in_use_is_not_set_up_again():
    make_key(make_tenant())
    browser = Client()
    browser.force_login(make_operator())
    assert browser.get("/setup/").headers["Location"] == "/"
    assert b"belong to no tenant" in browser.get("/").content


def at_once(work) -> list[object]:
    """Four threads through one door."""
    door = threading.Barrier(4, timeout=30)

    def enter(number: int) -> object:
        try:
            door.wait()
            return work(number)
        except (SetupClosed, ValidationError) as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(enter, range(4)))


def become_operator(number: int) -> User:
    return create_first_operator(token=token(), email=f"visitor{number}@example.org", password=PASSWORD)


@committed
def test_of_visitors_at_once_one_becomes_the_operator():
    ends = at_once(become_operator)
    assert User.objects.filter(is_superuser=True).count() == 1
    assert sum(isinstance(end, User) for end in ends) == 1
    assert sum(isinstance(end, SetupClosed) for end in ends) == 3


@committed
def test_control_without_the_lock_several_do(monkeypatch):
    """The same with a double that waits for the others instead of locking: each finds nobody there."""
    seen = threading.Barrier(4, timeout=30)
    real = first_run.check_setup_token

    def check_then_wait(given: str) -> None:
        real(given)
        seen.wait()

    monkeypatch.setattr(first_run, "_one_at_a_time", lambda: None)
    monkeypatch.setattr(first_run, "check_setup_token", check_then_wait)
    at_once(become_operator)
    assert User.objects.filter(is_superuser=True).count() == 4


@committed
def test_of_two_tabs_one_makes_the_first_tenant():
    operator, tier = make_operator(), make_tier()
    actor = Actor.person(operator)
    ends = at_once(
        lambda number: create_first_tenant(actor=actor, name=f"Tenant {number}", tier=tier, owner=operator)
    )
    assert Tenant.objects.count() == 1
    assert sum(isinstance(end, SetupClosed) for end in ends) == 3
