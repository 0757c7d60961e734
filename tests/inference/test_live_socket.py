"""`/ws/live`: fresh figures for who may see them, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from inference.live import CLOSE_GONE
from tenants.models import User
from tenants.principal import LimitMetric
from tests.e2e.site import MODEL, Site
from tests.factories import Cast, make_cast, set_limit
from tests.inference.test_chat_socket import session_cookie

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def cast(transactional_db: None) -> Cast:
    return make_cast()


@contextmanager
def watching(site: Site, user: User | None, part: str, tenant: str = "") -> Iterator[ClientConnection]:
    with connect(
        f"ws://localhost:{site.port}/ws/live?part={part}&tenant={tenant}",
        additional_headers={"Cookie": session_cookie(user)} if user else {},
        origin=site.url,  # type: ignore[arg-type]  # a NewType of str
        proxy=None,
    ) as connection:
        yield connection


def hear(connection: ClientConnection) -> str:
    text = connection.recv(timeout=30)
    assert isinstance(text, str)
    return text


def hear_news(connection: ClientConnection) -> str:
    while (text := hear(connection)) == " ":
        pass
    return text


def closed_with(connection: ClientConnection) -> int | None:
    with suppress(ConnectionClosed):
        for _ in range(20):
            hear(connection)
    return connection.close_code


def test_a_member_sees_what_changes_until_they_leave(site: Site, cast: Cast):
    set_limit(cast.tenant, LimitMetric.REQUESTS, 600)
    with watching(site, cast.member, "limits", str(cast.tenant.public_id)) as connection:
        assert "600 of 600" in hear_news(connection)
        assert hear(connection) == " "
        set_limit(cast.tenant, LimitMetric.REQUESTS, 700)
        assert "of 700" in hear_news(connection)
        cast.tenant.memberships.filter(user=cast.member).delete()
        assert closed_with(connection) == CLOSE_GONE


def test_staff_see_the_fleet(site: Site, cast: Cast):
    with watching(site, cast.operator, "fleet") as connection:
        assert MODEL in hear_news(connection)


@pytest.mark.parametrize("part", ["limits", "batches", "fleet", "nothing"])
def test_others_see_nothing(site: Site, cast: Cast, part: str):
    for person in (None, cast.outsider):
        with watching(site, person, part, str(cast.tenant.public_id)) as connection:
            assert closed_with(connection) == CLOSE_GONE
    with watching(site, cast.owner, part, "no-tenant") as connection:
        assert closed_with(connection) == CLOSE_GONE
