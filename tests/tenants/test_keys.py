"""What a key may do, from where, as what; and how its secret is changed without a gap."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connections, transaction
from django.test import RequestFactory
from django.utils import timezone

from tenants.auth import ExpiredKey, InvalidKey, NetworkNotAllowed, authenticate_bearer
from tenants.client_address import client_address
from tenants.models import ApiKey, AuditEntry, Project
from tenants.principal import Scope
from tenants.services import (
    KeyLimit,
    RotationUnderway,
    create_project,
    key_limits,
    revoke_api_key,
    rotate_api_key,
    set_key_limits,
)
from tests.factories import TEST, make_key, make_tenant, make_tier

pytestmark = pytest.mark.django_db(transaction=True)
authenticate = async_to_sync(authenticate_bearer)
ID = "r" * 22


def rotated(issued, rotation_id=ID, **given):
    return rotate_api_key(actor=TEST, api_key=issued.api_key, rotation_id=rotation_id, **given)


def test_both_secrets_work_for_the_overlap_and_then_the_new_one_alone():
    """FAULTS 67."""
    issued = make_key()
    new = rotated(issued, overlap=timedelta(hours=1))
    assert new.secret != issued.secret
    assert new.api_key.prefix == issued.api_key.prefix
    first, second = authenticate(issued.secret), authenticate(new.secret)
    assert first.key_public_id == second.key_public_id == str(issued.api_key.public_id)
    ApiKey.objects.filter(tenant=issued.api_key.tenant).update(
        previous_until=timezone.now() - timedelta(seconds=1)
    )
    with pytest.raises(ExpiredKey):
        authenticate(issued.secret)
    assert authenticate(new.secret)


def test_a_rotation_whose_answer_was_lost_is_asked_for_again():
    issued = make_key()
    secrets = {rotated(issued).secret for _ in range(3)}
    assert len(secrets) == 1
    assert authenticate(issued.secret)
    assert authenticate(secrets.pop())
    assert AuditEntry.objects.filter(tenant=issued.api_key.tenant, action="key.rotated").count() == 1


def test_a_second_rotation_waits_for_the_end_of_the_first():
    issued = make_key()
    new = rotated(issued)
    with pytest.raises(RotationUnderway):
        rotated(issued, "s" * 22)
    assert authenticate(issued.secret)
    ApiKey.objects.filter(tenant=issued.api_key.tenant).update(previous_until=timezone.now())
    newest = rotated(issued, "s" * 22, overlap=timedelta(0))
    for gone in (issued.secret, new.secret):
        with pytest.raises((InvalidKey, ExpiredKey)):
            authenticate(gone)
    assert authenticate(newest.secret)


@pytest.mark.parametrize(
    "given", [{"rotation_id": "short"}, {"overlap": timedelta(days=31)}, {"overlap": timedelta(seconds=-1)}]
)
def test_a_rotation_that_will_not_do(given):
    issued = make_key()
    with pytest.raises(ValidationError):
        rotated(issued, **given)
    revoke_api_key(actor=TEST, api_key=issued.api_key)
    with pytest.raises(ValidationError):
        rotated(issued)


def test_rotations_at_once_are_one():
    issued = make_key()
    barrier = threading.Barrier(4)

    def rotate(_: int) -> str:
        try:
            barrier.wait(timeout=10)
            return rotated(issued).secret
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(rotate, range(4)))) == 1
    assert authenticate(issued.secret)


def test_a_rotation_id_is_not_kept():
    issued = make_key()
    rotated(issued)
    row = ApiKey.objects.get(tenant=issued.api_key.tenant, pk=issued.api_key.pk)
    assert ID.encode() not in bytes(row.rotation_digest)


@pytest.mark.parametrize(
    ("networks", "address", "good"),
    [
        (["192.0.2.0/24"], "192.0.2.77", True),
        (["192.0.2.0/24"], "::ffff:192.0.2.77", True),
        (["192.0.2.0/24"], "192.0.3.1", False),
        (["192.0.2.0/24", "2001:db8::/32"], "2001:db8::1", True),
        (["192.0.2.0/24"], None, False),
        (["192.0.2.0/24"], "not an address", False),
        ([], None, True),
    ],
)
def test_a_key_is_good_only_from_its_networks(networks, address, good):
    issued = make_key(allowed_networks=networks)
    if good:
        assert authenticate(issued.secret, address)
    else:
        with pytest.raises(NetworkNotAllowed):
            authenticate(issued.secret, address)


@pytest.mark.parametrize("network", ["192.0.2.1/24", "example.org", "10.0.0.0/33", ""])
def test_a_network_that_is_none_is_refused(network):
    with pytest.raises(ValidationError):
        make_key(allowed_networks=[network])


@pytest.mark.parametrize(
    ("behind_proxy", "forwarded", "found"),
    [
        (False, "198.51.100.9", "127.0.0.1"),
        (True, "198.51.100.9", "198.51.100.9"),
        (True, "10.9.9.9, 198.51.100.9", "198.51.100.9"),
        (True, None, "127.0.0.1"),
    ],
)
def test_only_the_trusted_proxy_says_where_a_client_is(settings, behind_proxy, forwarded, found):
    settings.BEHIND_PROXY = behind_proxy
    headers = {} if forwarded is None else {"HTTP_X_FORWARDED_FOR": forwarded}
    assert client_address(RequestFactory().get("/", **headers)) == found


def test_a_keys_own_tier_makes_it_lesser_never_better():
    realtime, standard, batch = make_tier("realtime"), make_tier("standard"), make_tier("batch")
    tenant = make_tenant(tier=standard)
    for tier, found in [(batch, "batch"), (realtime, "standard"), (None, "standard")]:
        assert authenticate(make_key(tenant, max_tier=tier).secret).tier.name == found


def test_admin_is_every_scope():
    assert authenticate(make_key(scopes=[Scope.ADMIN]).secret).scopes == set(Scope)


def test_a_project_groups_keys_of_its_own_tenant():
    tenant, other = make_tenant(), make_tenant()
    project = create_project(actor=TEST, tenant=tenant, name=" Search ")
    create_project(actor=TEST, tenant=other, name="Search")
    with pytest.raises(ValidationError):
        create_project(actor=TEST, tenant=tenant, name="Search")
    key = make_key(tenant, project=project).api_key
    assert (key.project, project.name) == (project, "Search")
    with pytest.raises(ValueError, match="another tenant"):
        make_key(other, project=project)
    # Past the service, the database itself refuses.
    with pytest.raises(DatabaseError), transaction.atomic():
        ApiKey.objects.filter(tenant=tenant).update(project=Project.objects.get(tenant=other))


def _at_once(*tasks):
    """Runs these side by side, from one barrier; what each returned or was refused."""
    barrier = threading.Barrier(len(tasks), timeout=60)

    def run(task):
        try:
            barrier.wait()
            return task()
        except ValidationError as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def test_of_two_who_set_a_limit_at_once_the_second_changes_the_firsts():
    """Each audit entry tells the true value before; none of the two meets the other's row."""
    for _ in range(5):
        api_key = make_key().api_key

        def limit(amount, api_key=api_key):
            wanted = {KeyLimit.COST_PER_MONTH: amount, KeyLimit.REQUESTS_PER_MINUTE: amount}
            return lambda: set_key_limits(actor=TEST, api_key=api_key, wanted=wanted)

        assert _at_once(limit(1), limit(2), limit(3)) == [None] * 3
        entries = AuditEntry.objects.filter(tenant=api_key.tenant, action="limit.set").order_by("id")
        costs = [entry for entry in entries if entry.after["metric"] == "cost"]
        assert [entry.before and entry.before["amount"] for entry in costs] == [
            None, *(entry.after["amount"] for entry in costs[:-1])
        ]  # fmt: skip
        assert key_limits(api_key)[KeyLimit.COST_PER_MONTH] == costs[-1].after["amount"]

        def lift(api_key=api_key):
            set_key_limits(actor=TEST, api_key=api_key, wanted={KeyLimit.COST_PER_MONTH: None})

        assert _at_once(lift, lift, lift) == [None] * 3
        assert AuditEntry.objects.filter(tenant=api_key.tenant, action="limit.removed").count() == 1


def test_of_two_who_take_a_projects_name_at_once_one_is_told():
    tenant = make_tenant()
    for number in range(5):

        def make(name=f"Search {number}"):
            return create_project(actor=TEST, tenant=tenant, name=name)

        ended = _at_once(make, make, make)
        assert sum(isinstance(end, Project) for end in ended) == 1, ended
