"""PostgreSQL and Redis: whether they answer us, and whether they are set up as they must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import psycopg
from django.conf import settings
from django.db import connection, connections
from django.db.migrations.executor import MigrationExecutor
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from engine_worker.broker.connection import connect_sync, disconnect_sync
from inference.replica import REPLICA, SECONDS_BEHIND
from weir.doctor.finding import RESTART, TIMEOUT_S, Finding
from weir.logs import mask

CLOCK_S: Final = 2.0
"""Clocks that are further apart than this make times in the ledger wrong, and codes of second factors fail."""
SET_THE_CLOCK: Final = "Let every machine keep its clock by NTP (chrony, systemd-timesyncd)."

_BACKEND: Final = "SELECT pg_backend_pid()"
_STATEMENTS: Final = 20
_DATABASE_CURES: Final = (
    ("password authentication failed", "Correct the user or the password in DATABASE_URL."),
    ("no password supplied", "Give the password in DATABASE_URL (postgres://USER:PASSWORD@HOST/NAME)."),
    ("does not exist", "Make the database and its role, or correct their names in DATABASE_URL."),
    ("no pg_hba.conf entry", "Let this machine in: a line in PostgreSQL's pg_hba.conf, and reload."),
    ("too many", "Lower WEIR_DATABASE_POOL, raise PostgreSQL's max_connections, or put a pooler between."),
    ("translate host name", "Correct the host in DATABASE_URL, or the name service of this machine."),
)
"""What PostgreSQL says, and what helps."""
_REDIS_CURES: Final = (
    ("invalid username-password", "Correct the user or the password in REDIS_URL."),
    ("wrongpass", "Correct the user or the password in REDIS_URL."),
    ("authentication required", "Give the password in REDIS_URL (redis://:PASSWORD@HOST:PORT/DB)."),
    (
        "without any password configured",
        "Take the password out of REDIS_URL, or set one in Redis (requirepass).",
    ),
    ("noperm", "Give the user in REDIS_URL the rights that it lacks (ACL SETUSER)."),
    ("no permissions", "Give the user in REDIS_URL the rights that it lacks (ACL SETUSER)."),
    ("loading", "It reads its data after a start: wait, then ask again."),
    ("misconf", "Its disk is full or broken: see its log, and free some."),
)


def database() -> Iterator[Finding]:
    try:
        # Not by the pool, which tries until its time is over and then knows no reason.
        with psycopg.connect(**connection.get_connection_params()) as direct:
            (version,) = direct.execute("SHOW server_version").fetchone() or ("",)
    except psycopg.Error as error:
        yield _away(
            "database", error, _DATABASE_CURES, f"Start PostgreSQL, or correct DATABASE_URL. {RESTART}"
        )
        return
    yield Finding("ok", "database", f"PostgreSQL {version} answers")


def replica() -> Iterator[Finding]:
    """Nothing of it is an error: the primary answers in its place."""
    if REPLICA not in settings.DATABASES:
        return
    try:
        with psycopg.connect(**connections[REPLICA].get_connection_params()) as direct:
            (is_replica, lag) = direct.execute(
                f"SELECT pg_is_in_recovery(), ({SECONDS_BEHIND})"
            ).fetchone() or (
                False,
                None,
            )
    except psycopg.Error as error:
        away = _away(
            REPLICA, error, (), "Start it, or correct WEIR_REPLICA_URL; reports come from the primary."
        )
        yield replace(away, level="warning")
        return
    if not is_replica:
        yield Finding(
            "warning",
            REPLICA,
            "WEIR_REPLICA_URL names a server that follows no other: its reports may stand still",
            "Name a streaming replica (in recovery), or leave it out.",
        )
    elif lag is None or lag > settings.REPLICA_MAX_LAG_S:
        behind = "it has replayed nothing yet" if lag is None else f"it is {lag:,.0f} s behind"
        yield Finding(
            "warning",
            REPLICA,
            f"{behind}, more than WEIR_REPLICA_MAX_LAG_S: reports come from the primary",
            "Look at its log, its disk, its way to the primary, and queries that hold up its replay.",
        )
    else:
        yield Finding("ok", REPLICA, f"keeps up ({lag:,.0f} s behind)")


def migrations() -> Iterator[Finding]:
    executor = MigrationExecutor(connection)
    missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if missing:
        names = ", ".join(f"{migration.app_label}.{migration.name}" for migration, _ in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        yield Finding("error", "database", f"not migrated: {names}{more}", "python manage.py migrate")
    else:
        yield Finding("ok", "database", "migrated")


def pooler() -> Iterator[Finding]:
    """One that lends sessions by the transaction shows when a second connection is given the first one's."""
    with psycopg.connect(**connection.get_connection_params(), autocommit=True) as first:
        first_pid = first.execute(_BACKEND).fetchone()
        with psycopg.connect(**connection.get_connection_params(), autocommit=True) as second:
            pids = {second.execute(_BACKEND).fetchone() for _ in range(_STATEMENTS)}
    if first_pid not in pids and len(pids) == 1:
        return
    if settings.ROW_SECURITY:
        yield Finding(
            "error",
            "database",
            "WEIR_ROW_SECURITY is on behind a pooler in transaction mode: a session's tenant becomes another's",
            "Let the pooler lend sessions (pool_mode = session), or set WEIR_ROW_SECURITY=false.",
        )
    else:
        yield Finding("ok", "database", "a pooler in transaction mode stands between")


def row_security() -> Iterator[Finding]:
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


def database_clock(now: Callable[[], float] = time.time) -> Iterator[Finding]:
    with connection.cursor() as cursor:
        asked_at = now()
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
        (theirs,) = cursor.fetchone()
    yield from _clock("PostgreSQL's", float(theirs), asked_at)


def redis() -> Iterator[Finding]:
    try:
        client = _redis_client()
        try:
            client.ping()
            yield Finding("ok", "redis", "answers")
            yield from _redis_settings(client)
        finally:
            disconnect_sync(client)
    except RedisError as error:
        yield _away("redis", error, _REDIS_CURES, f"Start Redis or Valkey, or correct REDIS_URL. {RESTART}")


def redis_clock(now: Callable[[], float] = time.time) -> Iterator[Finding]:
    client = _redis_client()
    try:
        asked_at = now()
        told: Any = client.time()
    except RedisError:
        return  # a cluster's nodes each have a clock
    finally:
        disconnect_sync(client)
    seconds, microseconds = told
    yield from _clock("Redis's", seconds + microseconds / 1e6, asked_at)


def _redis_client() -> Redis:
    return connect_sync(
        settings.REDIS_URL, connect_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
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
    kept = client.info("persistence")
    if "err" in (kept.get("aof_last_write_status"), kept.get("rdb_last_bgsave_status")):
        yield Finding(
            "error", "redis", "can't write to its disk, and may refuse every write", "Free some of that disk."
        )
    if not kept["aof_enabled"]:
        yield Finding(
            "warning",
            "redis",
            "keeps nothing on disk: a restart loses what is queued and usage not yet in the ledger",
            "CONFIG SET appendonly yes, and write it to its configuration file.",
        )


def _away(part: str, error: Exception, cures: tuple[tuple[str, str], ...], otherwise: str) -> Finding:
    said = mask(str(error)).strip()
    cure = next((cure for sign, cure in cures if sign in said.lower()), otherwise)
    is_refused = cure is not otherwise
    return Finding("error", part, f"{'refuses us' if is_refused else 'does not answer'}: {said}", cure)


def _clock(whose: str, theirs: float, asked_at: float) -> Iterator[Finding]:
    ahead_s = theirs - asked_at
    if abs(ahead_s) > CLOCK_S:
        yield Finding("warning", "clock", f"{whose} clock is {_apart(ahead_s)} this machine's", SET_THE_CLOCK)


def _apart(ahead_s: float) -> str:
    return f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
