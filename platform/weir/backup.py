"""What an installation must not lose, in one folder: the database, usage that is not in the ledger yet, the secrets.

Usage is copied before the database: what moves from the stream into the ledger meanwhile is in both, and the ledger
takes each request once. Everything else in Redis can be rebuilt: limits and budgets start from the ledger.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from django.conf import settings
from django.db import connection
from redis.exceptions import RedisError

from engine_worker.broker import UsageReader
from engine_worker.protocol import UsageEvent, decode, encode
from inference.services.ledger import record_usage
from weir import embedded
from weir.errors import StartError

_FORMAT: Final = 1
_BATCH: Final = 500
_LONGEST_S: Final = 6 * 3600.0
_SECRETS: Final = ("secret_key", "api_key_pepper")


class BackupError(StartError):
    """Nothing was kept, or nothing restored; the message says why."""


def make_backup(target: Path) -> dict[str, object]:
    """Writes a backup to `target`, which must not exist, while everything runs. Raises BackupError."""
    if target.exists():
        raise BackupError(f"{target} is there already: name a new folder")
    draft = target.with_name(f"{target.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    events = _usage_in_flight()
    (draft / "usage.msgpack").write_bytes(msgspec.msgpack.encode([encode(event) for event in events]))
    _run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={draft / 'database.dump'}")
    if settings.SECRETS_ARE_GENERATED:
        (draft / "secrets").mkdir(mode=0o700)
        for name in _SECRETS:
            if (kept := settings.VAR_DIR / "secrets" / name).exists():
                shutil.copy2(kept, draft / "secrets" / name)
    manifest: dict[str, object] = {
        "format": _FORMAT,
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "usage_events": len(events),
        "holds_secrets": settings.SECRETS_ARE_GENERATED,
    }
    (draft / "manifest.json").write_text(json.dumps(manifest))
    draft.rename(target)
    return manifest


def restore_backup(source: Path) -> dict[str, object]:
    """Fills an empty database from `source`. The database and its usage come back or neither. Raises BackupError."""
    try:
        manifest: dict[str, object] = json.loads((source / "manifest.json").read_text())
        events = [
            decode(event, UsageEvent)
            for event in msgspec.msgpack.decode((source / "usage.msgpack").read_bytes(), type=list[bytes])
        ]
    except (OSError, ValueError) as error:
        raise BackupError(f"{source} is no backup of Weir's: {error}") from error
    if manifest["format"] != _FORMAT:
        raise BackupError(
            f"{source} has format {manifest['format']}: restore it with the version that made it"
        )
    if connection.introspection.table_names():
        raise BackupError("the database is not empty: a backup is restored into an empty one")
    connection.close()
    secrets = _restore_secrets(source)
    _run("pg_restore", "--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges",
         f"--dbname={settings.DATABASES['default']['NAME']}", str(source / "database.dump"))  # fmt: skip
    parked = 0
    for first in range(0, len(events), _BATCH):
        parked += len(record_usage(events[first : first + _BATCH])[1])
    return manifest | {"secrets_restored": secrets, "parked": parked}


def _usage_in_flight() -> Sequence[UsageEvent]:
    reader = UsageReader(settings.REDIS_URL)
    try:
        return reader.waiting()
    except RedisError as error:
        raise BackupError(f"Redis does not tell what usage waits: {error}") from error
    finally:
        reader.close()


def _restore_secrets(source: Path) -> bool:
    """Puts the secrets where generated ones are kept, unless others are given or there already."""
    kept = source / "secrets"
    if not kept.exists() or not settings.SECRETS_ARE_GENERATED:
        return False
    directory = settings.VAR_DIR / "secrets"
    for name in _SECRETS:
        file = directory / name
        if (kept / name).exists() and (not file.exists() or file.read_bytes() != (kept / name).read_bytes()):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(kept / name, file)
    return True


def _run(program: str, *arguments: str) -> None:
    """The database and its password travel in the environment: others can see a command line."""
    database = settings.DATABASES["default"]
    given = {
        "PGHOST": "HOST",
        "PGPORT": "PORT",
        "PGUSER": "USER",
        "PGPASSWORD": "PASSWORD",
        "PGDATABASE": "NAME",
    }
    env = os.environ | {name: str(database[key]) for name, key in given.items() if database.get(key)}
    found = embedded.postgres_program(program) or shutil.which(program)
    if found is None:
        raise BackupError(f"{program} is not there: install PostgreSQL's client programs")
    done = subprocess.run(
        [str(found), *arguments], env=env, capture_output=True, text=True, check=False, timeout=_LONGEST_S
    )
    if done.returncode != 0:
        raise BackupError(f"{program} failed: {done.stderr.strip()[-2000:]}")
