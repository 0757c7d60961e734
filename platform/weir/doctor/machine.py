"""What this machine has: secrets, a model, room on its disks, settings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import ERROR, run_checks

from tenants.key_format import digest_key, parse_key
from tenants.key_verdict import Verdict, judge
from tenants.principal_selectors import find_stored_key
from tenants.row_security import NOBODY_YET, bound_to
from tenants.selectors import live_keys_made_before
from weir.demo import known_logins
from weir.doctor.finding import Finding, Level

_DISK_LEAST_BYTES: Final = 1 << 30
_RESTORE_PEPPER: Final = (
    "Set WEIR_API_KEY_PEPPER to the value that keys were made with, the same for every process, or restore "
    "var/secrets/api_key_pepper from a backup. If it is lost, every key must be made anew."
)


def pepper() -> Iterator[Finding]:
    """Nobody can tell from the database alone: a key whose secret is at hand can, and else the age of the file."""
    where, token = "WEIR_API_KEY", os.environ.get("WEIR_API_KEY", "")
    if not token:
        where, token = "demo.env", known_logins(settings.VAR_DIR / "demo.env").get("WEIR_API_KEY", "")
    if not token:
        yield from _age_of_pepper()
        return
    key = parse_key(token.strip())
    with bound_to(NOBODY_YET):
        stored = None if key is None else find_stored_key(key.lookup_id)
    if key is None or stored is None:
        yield Finding(
            "warning", "keys", f"the key in {where} is not in this database", "Is DATABASE_URL the right one?"
        )
        return
    verdict = judge(stored, digest_key(key, pepper=settings.API_KEY_PEPPER))
    if verdict is Verdict.GOOD:
        yield Finding("ok", "keys", "the pepper is the one that API keys were made with")
    elif verdict is not Verdict.INVALID:
        yield Finding(
            "warning", "keys", f"the key in {where} is {verdict.name.lower()}", "Have another one issued."
        )
    elif stored.previous_digest is not None:
        yield Finding("warning", "keys", f"the key in {where} was rotated since", "Use its successor.")
    else:
        text = f"the key in {where} was made under another pepper: no API key is taken"
        yield Finding("error", "keys", text, _RESTORE_PEPPER)


def _age_of_pepper() -> Iterator[Finding]:
    file = settings.VAR_DIR / "secrets" / "api_key_pepper"
    if not settings.SECRETS_ARE_GENERATED or not file.exists():
        return
    made_at = datetime.fromtimestamp(file.stat().st_mtime, tz=UTC)
    if older := live_keys_made_before(made_at):
        yield Finding(
            "warning",
            "keys",
            f"{older} API keys are older than {file} ({made_at:%Y-%m-%d %H:%M} UTC): made under another pepper, none "
            "of them is taken",
            f"{_RESTORE_PEPPER} To know: WEIR_API_KEY=KEY weir doctor",
        )


def model() -> Iterator[Finding]:
    """The one that `up` serves, where it is a place and not a name."""
    if "/" not in settings.MODEL:
        return
    path = Path(settings.MODEL).expanduser()
    problem = ""
    if not path.exists():
        problem = "is not there"
    elif path.is_dir() and not (path / "config.json").is_file():
        problem = "is no Hugging Face directory: it has no config.json"
    if problem:
        yield Finding(
            "error",
            "model",
            f"WEIR_MODEL names {path}, which {problem}",
            "Correct it, or mount what it names.",
        )


def disk() -> Iterator[Finding]:
    told: set[int] = set()
    for name in (".", "models", "postgres", "valkey"):
        folder = settings.VAR_DIR / name
        if not folder.exists() or (device := folder.stat().st_dev) in told:
            continue  # each may have a volume of its own
        told.add(device)
        free = shutil.disk_usage(folder).free
        if free < _DISK_LEAST_BYTES:
            yield Finding(
                "warning" if free else "error",
                "disk",
                f"{free >> 20} MiB left under {folder}",
                "Free some, or move WEIR_VAR_DIR.",
            )


def settings_in_force() -> Iterator[Finding]:
    is_local = urlsplit(settings.BASE_URL).hostname in {"localhost", "127.0.0.1", "::1"}
    for message in run_checks(include_deployment_checks=not is_local):
        if message.is_silenced():
            continue
        level: Level = "error" if message.level >= ERROR else "warning"
        yield Finding(level, f"settings ({message.id})", message.msg, message.hint or "")
