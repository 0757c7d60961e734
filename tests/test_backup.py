"""The drill: back up while it runs; lose database, secrets and Redis; restore; nothing that was used is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connection

from inference.services.ledger import record_usage
from tenants.key_format import digest_key, parse_key
from tests.databases import NO_REDIS, a_database, manage, url_of
from tests.factories import make_key, make_tenant
from tests.inference.ledger_driving import an_event, ledger_redis_url, publish, waiting


@pytest.fixture
def empty_database() -> Iterator[str]:
    with a_database() as name:
        yield name


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_backup_wipe_restore(tmp_path: Path, empty_database: str):
    tenant = make_tenant()
    key = make_key(tenant)
    booked = [an_event(str(tenant.public_id), completion_tokens=number) for number in range(1, 6)]
    record_usage(booked)
    # On its way: three that no ledger has, and one that is in the ledger and was not acknowledged yet.
    flying = [an_event(str(tenant.public_id), completion_tokens=100) for _ in range(3)]
    publish([*flying, booked[0]])
    assert waiting() >= 4

    backup = tmp_path / "backup"
    source = str(connection.settings_dict["NAME"])
    given: dict[str, Any] = {"var_dir": settings.VAR_DIR, "redis_url": ledger_redis_url()}
    made = manage("backup", str(backup), database=source, **given)
    assert made.returncode == 0, made.stderr
    assert {path.name for path in backup.iterdir()} == {
        "usage.msgpack",
        "database.dump",
        "secrets",
        "manifest.json",
    }
    assert backup.stat().st_mode & 0o077 == 0
    assert "there already" in manage("backup", str(backup), database=source, **given).stderr
    refused = manage("restore", str(backup), database=source, **given)
    assert "not empty" in refused.stderr
    assert refused.returncode != 0

    # The wipe: another database, another var/, a Redis that is not even there.
    fresh: dict[str, Any] = {"var_dir": tmp_path / "var", "redis_url": NO_REDIS}
    restored = manage("restore", str(backup), database=empty_database, **fresh)
    assert restored.returncode == 0, restored.stderr
    reconciled = manage("reconcile", database=empty_database, **fresh)
    assert reconciled.returncode == 0, reconciled.stdout + reconciled.stderr

    with psycopg.connect(url_of(empty_database)) as database:
        rows = database.execute(
            "SELECT request_id, completion_tokens FROM inference_usagerecord WHERE tenant_id = %s",
            [tenant.pk],
        ).fetchall()
        assert dict(rows) == {event.request_id: event.completion_tokens for event in [*booked, *flying]}
        assert len(rows) == 8, "each once"
        (digest,) = database.execute(
            "SELECT digest FROM tenants_apikey WHERE public_id = %s", [key.api_key.public_id]
        ).fetchone() or (None,)
    pepper = (tmp_path / "var" / "secrets" / "api_key_pepper").read_text().strip()
    parsed = parse_key(key.secret)
    assert parsed
    assert bytes(digest) == digest_key(parsed, pepper=pepper), "the key still opens"
    assert manage("migrate", "--check", database=empty_database, **fresh).returncode == 0


@pytest.mark.django_db
def test_what_is_no_backup_is_refused(tmp_path: Path):
    (tmp_path / "manifest.json").write_text("{}")
    said = manage("restore", str(tmp_path), database="any", var_dir=tmp_path / "var", redis_url=NO_REDIS)
    assert said.returncode != 0
    assert "no backup" in said.stderr
    assert "Traceback" not in said.stderr
