"""What every test gets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from django.db import connection

from tenants.row_security import NOBODY_YET, bound_to
from tests import emptying
from tests.factories import Cast, make_cast

_HERE = Path(__file__).parent
emptying.install()
# Each client of httpx, and so of OpenAI's and Anthropic's SDKs, would read the authorities' certificates anew: 40 ms.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)

# How fast a machine makes examples says nothing of what they are for: a busy one failed tests by that.
hypothesis.settings.register_profile(
    "weir", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("weir")

_LONG = (
    "weir/test_up.py",
    "e2e/test_pages.py",
    "engine_worker/engine/test_families.py",
    "engine_worker/engine/test_exactness.py",
    "engine_worker/attention/test_triton_kernels.py",
    "inference/conformance/test_clients.py",
    "inference/test_real_model.py",
    "test_upgrade.py",
    "test_backup.py",
    "weir/test_health.py",
    "inference/api/test_who_may.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several processes, each of which takes file by file: the longest first, or one ends with such a one when the
    others have nothing left to do. The rest by folder: sites that take turns start a worker each time."""
    if hasattr(config, "workerinput"):
        places = {_HERE / name: place for place, name in enumerate(_LONG)}
        items.sort(key=lambda item: (places.get(item.path, len(places)), item.path.parent, item.path))


@pytest.fixture(autouse=True)
def _fast_passwords(settings: Any) -> None:
    # Real hashing costs half a second per person on a busy machine, and no test is about its strength.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """pytest-django's, which drops the database at the end: a session that is left would keep it from that.

    Idle ones are left where async code used the database: its threads, and their connections, outlive a test.
    """
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
        )


@pytest.fixture(autouse=True)
def _site_serves(request: pytest.FixtureRequest) -> None:
    """The site that a test asks for is the one that serves: see Site.serve()."""
    if "site" in request.fixturenames:
        # Here and not above: it imports Triton, whose interpreter a conftest further down switches on.
        from tests.e2e.site import Site

        if isinstance(site := request.getfixturevalue("site"), Site):
            site.serve()


@pytest.fixture(autouse=True)
def _nobody_yet() -> Iterator[None]:
    """Whose rows a page bound its thread to is not the next test's: servers give each request a context of its own."""
    with bound_to(NOBODY_YET):
        yield


@pytest.fixture
def cast(db: None) -> Cast:
    """Two tenants with their people, and an operator."""
    return make_cast()
