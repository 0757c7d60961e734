"""Deployment mistakes have ids and hints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks

ROOT = Path(__file__).resolve().parents[2]


def ids(*, deploy: bool = False) -> set[str | None]:
    return {message.id for message in run_checks(include_deployment_checks=deploy)}


@pytest.fixture(autouse=True)
def _given_secrets(settings: Any) -> None:
    settings.SECRETS_ARE_GENERATED = False  # the tests' own are, beside a database that was named


def test_this_tree_has_none():
    assert ids() == set()


def test_generated_secrets_beside_a_shared_database(settings: Any):
    settings.DATABASE_IS_EMBEDDED = False
    settings.SECRETS_ARE_GENERATED = True
    assert ids() == {"weir.W001"}
    settings.SECRETS_ARE_GENERATED = False
    assert ids() == set()


def test_a_secret_that_others_can_read(settings: Any, tmp_path: Path):
    (tmp_path / "secrets").mkdir()
    file = tmp_path / "secrets" / "secret_key"
    file.write_text("x")
    settings.VAR_DIR = tmp_path
    file.chmod(0o644)
    assert ids() == {"weir.E001"}
    file.chmod(0o600)
    assert ids() == set()


def test_debug_and_plain_http_in_production(settings: Any):
    settings.DEBUG = True
    settings.BASE_URL = "http://weir.example.com"
    assert {"weir.E002", "weir.W002"} <= ids(deploy=True)
    settings.DEBUG = False
    settings.BASE_URL = "https://weir.example.com"
    assert not {"weir.E002", "weir.W002"} & ids(deploy=True)


def test_an_installation_set_up_as_the_documentation_says_passes_every_deploy_check():
    """In a process of its own: settings are made from the environment at import."""
    environment = os.environ | {
        "WEIR_BASE_URL": "https://weir.example.com",
        "WEIR_BEHIND_PROXY": "true",
        "WEIR_SECRET_KEY": "7" + "abcdefghij0123456789" * 3,
        "WEIR_API_KEY_PEPPER": "8" + "abcdefghij0123456789" * 3,
    }
    command = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"WEIR_DEBUG": "true"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "weir.E002" in done.stderr


def test_an_embedded_database_in_a_cluster(settings: Any, monkeypatch: pytest.MonkeyPatch):
    settings.DATABASE_IS_EMBEDDED = True
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = run_checks(tags=["database"], databases=["default"])
    assert "weir.E003" in {message.id for message in found}
