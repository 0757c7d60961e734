"""Rules of the house that no linter knows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from django.apps import apps

from tenants.scope import TenantScopedManager

ROOT = Path(__file__).resolve().parent.parent

UNSCOPED_ALLOWED = {
    "tenants/scope.py": "defines it",
    "tenants/models/api_key.py": "declares it",
    "tenants/models/audit.py": "declares it",
    "tenants/models/member.py": "declares it",
    "tenants/models/quota.py": "declares it",
    "tenants/models/project.py": "declares it",
    "inference/models/usage.py": "declares it",
    "inference/models/alert.py": "declares it",
    "inference/models/export.py": "declares it",
    "inference/models/webhook.py": "declares it",
    "inference/models/idempotency.py": "declares it",
    "inference/services/idempotency.py": "deletes what expired, whosever it is",
    "inference/services/webhook_delivery.py": "sends what waits, whosever it is",
    "inference/services/exports.py": "writes what waits, whosever it is",
    "inference/services/alerts.py": "mails what waits, whosever it is",
    "inference/models/response.py": "declares it",
    "inference/services/responses.py": "deletes what expired, whosever it is",
    "inference/models/batch.py": "declares it",
    "inference/services/batches.py": "the runner goes on with every open batch",
    "inference/services/files.py": "deletes what expired, whosever it is",
    "inference/models/adjustment.py": "declares it",
    "inference/models/conversation.py": "declares it",
    "inference/models/rollup.py": "declares it",
    "tenants/principal_selectors.py": "finds the tenant that a key or a person belongs to",
    "tenants/selectors.py": "limits include the tier's; the ledger's keys are of all tenants",
    "tenants/services/audit.py": "the operator's own affairs belong to no tenant",
    "tenants/models/sign_on.py": "declares it",
    "tenants/models/service_account.py": "declares it",
    "tenants/models/data_copy.py": "declares it",
    "tenants/services/data_copies.py": "writes what waits, whosever it is",
    "tenants/models/invitation.py": "declares it",
    "tenants/services/invitations.py": "a link names no tenant; mails what waits, whosever it is",
    "tenants/services/deletion.py": "who belongs to a tenant alone belongs to no other",
    "tenants/services/limits.py": "a tier's limits belong to no tenant",
}
"""The only files that may see the rows of all tenants, each with its reason."""

OWNED_BY_OPERATOR_TOO = {"AuditEntry", "QuotaLimit"}
"""Their tenant may be null: rows about tiers and operators."""


def product_files() -> list[Path]:
    return [
        path
        for package in ("platform", "tenants", "inference", "engine_worker")
        for path in (ROOT / package).rglob("*.py")
        if "migrations" not in path.parts
    ]


def test_unscoped_is_used_only_where_it_may_be():
    users = {
        str(path.relative_to(ROOT))
        for path in product_files()
        if re.search(r"\bunscoped\b|_base_manager|_default_manager", path.read_text())
    }
    assert users == set(UNSCOPED_ALLOWED)


def test_every_row_of_a_tenant_is_behind_the_door():
    owned = [
        model
        for model in apps.get_models()
        if model._meta.app_label in {"tenants", "inference"}
        and any(field.name == "tenant" for field in model._meta.get_fields())
        and "tenant" in {field.name for field in model._meta.concrete_fields}
    ]
    assert {"ApiKey", "Membership", "UsageRecord"} <= {model.__name__ for model in owned}
    for model in owned:
        assert isinstance(model.objects, TenantScopedManager), model
        tenant = model._meta.get_field("tenant")
        assert tenant.null == (model.__name__ in OWNED_BY_OPERATOR_TOO), model


def test_migrations_are_checked_in_silence_where_no_database_runs(tmp_path):
    """By `make check`, on a machine where nothing was started: what it says then is of migrations alone."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "makemigrations" in line)
    env = {name: value for name, value in os.environ.items() if not name.endswith("_URL")}
    checked = subprocess.run(
        ["/bin/sh", "-c", line.strip().replace("$(PYTHON)", sys.executable)],
        cwd=ROOT,
        env=env | {"WEIR_VAR_DIR": str(tmp_path / "var"), "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "No changes detected\n", "")
