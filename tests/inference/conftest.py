"""The API as clients meet it: real sockets, the real gateway, a worker without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from django.db import connection
from openai import OpenAI

from tenants.principal import LimitMetric
from tests.e2e.site import MODEL, Site, running_site
from tests.factories import make_key, make_tenant, set_limit


@pytest.fixture(scope="session")
def site(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with running_site(connection.settings_dict, tmp_path_factory.mktemp("api-site")) as site:
        yield site


@pytest.fixture
def key(transactional_db: None) -> str:
    """A key without limits but generous ones, of a tenant of its own."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 10_000)
    set_limit(tenant, LimitMetric.TOKENS, 10_000_000)
    return make_key(tenant).secret


@pytest.fixture
def model() -> str:
    return MODEL


@pytest.fixture
def http(site: Site, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{site.url}/v1/", headers={"Authorization": f"Bearer {key}"}, timeout=60
    ) as client:
        yield client


@pytest.fixture
def sdk(site: Site) -> Iterator[Callable[[str], OpenAI]]:
    clients: list[OpenAI] = []

    def connect(secret: str) -> OpenAI:
        clients.append(OpenAI(base_url=f"{site.url}/v1", api_key=secret, max_retries=0, timeout=60))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
