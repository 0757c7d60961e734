"""What is wrong with this installation, and what to do about it: each check asks the real thing, within seconds."""

from __future__ import annotations

import asyncio
import shutil
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from engine_worker.broker import BrokerUnavailable, UsageReader
from engine_worker.broker.connection import connect_sync, disconnect_sync
from inference.operator_api import read_live_state
from weir.celery import app
from weir.logs import mask

_TIMEOUT_S: Final = 3.0
_DISK_LEAST_BYTES: Final = 1 << 30
_USAGE_MANY: Final = 10_000
_RESTART: Final = "On one machine `make run` starts it; otherwise see docs/operations.md."


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warning", "error"]
    part: str
    text: str
    what_to_do: str = ""


def examine() -> Iterator[Finding]:
    """Every check in turn; one that finds its server away says so, and those that need that server too are left out."""
    database_answers = yield from _reporting(_database)
    redis_answers = yield from _reporting(_redis)
    if database_answers:
        yield from _migrations()
        yield from _row_security()
    if redis_answers:
        yield from _engine()
        yield from _background()
    yield from _gateway()
    yield from _disk()
    yield from _settings()


def _reporting(check: Callable[[], Iterator[Finding]]) -> Generator[Finding, None, bool]:
    """Passes findings on; returns whether none was an error."""
    is_fine = True
    for finding in check():
        is_fine &= finding.level != "error"
        yield finding
    return is_fine


def _database() -> Iterator[Finding]:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            (version,) = cursor.fetchone()
    except DatabaseError as error:
        yield Finding(
            "error",
            "database",
            f"does not answer: {mask(str(error)).strip()}",
            f"Start PostgreSQL, or correct DATABASE_URL. {_RESTART}",
        )
        return
    yield Finding("ok", "database", f"PostgreSQL {version} answers")


def _migrations() -> Iterator[Finding]:
    executor = MigrationExecutor(connection)
    missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if missing:
        names = ", ".join(f"{migration.app_label}.{migration.name}" for migration, _ in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        yield Finding("error", "database", f"not migrated: {names}{more}", "python manage.py migrate")
    else:
        yield Finding("ok", "database", "migrated")


def _row_security() -> Iterator[Finding]:
    if not settings.ROW_SECURITY:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT rolname, rolsuper OR rolbypassrls OR pg_has_role(rolname, relowner, 'USAGE') "
            "FROM pg_roles, pg_class WHERE rolname = current_user AND pg_class.oid = to_regclass('tenants_tenant')"
        )
        found = cursor.fetchone()
    if found is None or not found[1]:
        yield Finding("ok", "database", "row-level security binds this role")
        return
    yield Finding(
        "warning",
        "database",
        f"WEIR_ROW_SECURITY is on, but the role {found[0]} is not bound by it: it sees every tenant's rows",
        "For gateways, set DATABASE_URL to the role weir_gateway of deploy/postgres/roles.sql.",
    )


def _redis() -> Iterator[Finding]:
    try:
        client = connect_sync(
            settings.REDIS_URL,
            connect_timeout_s=_TIMEOUT_S,
            timeout_s=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            client.ping()
            yield Finding("ok", "redis", "answers")
            yield from _redis_settings(client)
        finally:
            disconnect_sync(client)
    except RedisError as error:
        yield Finding(
            "error",
            "redis",
            f"does not answer: {mask(str(error))}",
            f"Start Redis or Valkey, or correct REDIS_URL. {_RESTART}",
        )


def _redis_settings(client: Redis) -> Iterator[Finding]:
    memory = client.info("memory")
    if memory["maxmemory_policy"] != "noeviction":
        yield Finding(
            "error",
            "redis",
            f"may evict limits and queued requests (maxmemory-policy {memory['maxmemory_policy']})",
            "CONFIG SET maxmemory-policy noeviction, and write it to its configuration file.",
        )
    if memory["maxmemory"] and memory["used_memory"] > 0.8 * memory["maxmemory"]:
        yield Finding(
            "warning", "redis", "is over 80 % of maxmemory", "Raise maxmemory before writes are refused."
        )
    if not client.info("persistence")["aof_enabled"]:
        yield Finding(
            "warning",
            "redis",
            "keeps nothing on disk: a restart loses what is queued and usage not yet in the ledger",
            "CONFIG SET appendonly yes, and write it to its configuration file.",
        )


def _engine() -> Iterator[Finding]:
    try:
        state = asyncio.run(read_live_state())
    except BrokerUnavailable as error:
        yield Finding("error", "engine", f"the queue can't be read: {error}", "Look at Redis's log.")
        return
    serving = sorted({worker.model for worker in state["workers"] if not worker.draining})
    if not serving:
        draining = " (all that are alive are draining)" if state["workers"] else ""
        yield Finding(
            "error",
            "engine",
            f"no worker serves a model{draining}: every request is refused",
            f"Start one: python -m engine_worker --model NAME=DIRECTORY, with this REDIS_URL. {_RESTART}",
        )
    else:
        yield Finding("ok", "engine", f"serves {', '.join(serving)}")
    for queue in state["models"]:
        waiting = sum(tier.waiting for tier in queue.tiers)
        if waiting and queue.model not in serving:
            yield Finding(
                "warning", "engine", f"{waiting} requests wait for {queue.model}, which no worker serves",
                "Start a worker for it; they end with an error at their deadline.",
            )  # fmt: skip
        if queue.dead:
            yield Finding(
                "warning", "engine", f"{queue.dead} dead letters of {queue.model}",
                f"python manage.py dead_letters list --model {queue.model}",
            )  # fmt: skip


def _background() -> Iterator[Finding]:
    try:
        answers = app.control.ping(timeout=1.0)
    except Exception as error:  # kombu passes on whatever its transport raises
        answers = []
        yield Finding("warning", "celery", f"can't be asked: {mask(str(error))}", "Look at Redis's log.")
    if answers:
        yield Finding("ok", "celery", f"{len(answers)} workers answer")
    else:
        yield Finding(
            "error",
            "celery",
            "no worker answers: usage does not reach the ledger",
            f"Start one: python -m celery -A weir.celery worker. {_RESTART}",
        )
    reader = UsageReader(settings.REDIS_URL)
    try:
        pending = reader.pending()
    finally:
        reader.close()
    if pending > _USAGE_MANY:
        yield Finding(
            "warning",
            "celery",
            f"{pending} usage events wait for the ledger",
            "Is beat running (exactly one)? If it is, start more Celery workers.",
        )


def _gateway() -> Iterator[Finding]:
    url = f"{settings.BASE_URL}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - settings allow http(s) alone
            is_ours = response.status == 200 and b'"status"' in response.read(200)
        problem = "" if is_ours else "answers, but is not Weir"
    except (OSError, ValueError) as error:
        problem = f"does not answer: {getattr(error, 'reason', None) or error}"
    if problem:
        yield Finding(
            "error",
            "gateway",
            f"{settings.BASE_URL} {problem}",
            f"Start a gateway, or set WEIR_BASE_URL to the address that clients use. {_RESTART}",
        )
    else:
        yield Finding("ok", "gateway", f"{settings.BASE_URL} answers")


def _disk() -> Iterator[Finding]:
    told: set[int] = set()
    for folder in (settings.VAR_DIR, settings.VAR_DIR / "models"):
        if not folder.exists() or (device := folder.stat().st_dev) in told:
            continue  # models may have a volume of their own
        told.add(device)
        free = shutil.disk_usage(folder).free
        if free < _DISK_LEAST_BYTES:
            yield Finding(
                "warning" if free else "error",
                "disk",
                f"{free >> 20} MiB left under {folder}",
                "Free some, or move WEIR_VAR_DIR.",
            )


def _settings() -> Iterator[Finding]:
    is_local = urlsplit(settings.BASE_URL).hostname in {"localhost", "127.0.0.1", "::1"}
    for message in run_checks(include_deployment_checks=not is_local):
        if message.is_silenced():
            continue
        level: Literal["warning", "error"] = "error" if message.level >= ERROR else "warning"
        yield Finding(level, f"settings ({message.id})", message.msg, message.hint or "")
