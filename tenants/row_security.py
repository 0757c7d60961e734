"""Row-level security: PostgreSQL's own lock on tenants' rows, behind the door of tenants/scope.py.

Where gateways connect as a role that may not bypass it (deploy/postgres/roles.sql) and WEIR_ROW_SECURITY is on, each
connection carries whose rows it may see:

    a tenant's id   from the moment in which the key or the member is known: that tenant's rows and nobody else's
    *               the operator's pages
    nothing         before that: keys, members and limits, which must be found to know who it is; no content, no ledger

So a query that forgot its tenant, or an injected one, finds nothing of others. Policies are made by `migrate` for every
table with a tenant, and every table that hangs below one; the tables' owner is not bound by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.apps import apps
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

EVERYBODY: Final = "*"
VARIABLE: Final = "weir.tenant"
_POLICY: Final = "weir_tenant"
_APPS: Final = ("tenants", "inference")
_SET: Final = f"SELECT set_config('{VARIABLE}', %s, false)"

NOBODY_YET: Final = ""

_bound: ContextVar[str] = ContextVar("row_security_tenant", default=NOBODY_YET)


def bind_tenant(tenant_id: int) -> None:
    """From here on, in this task or thread and what it starts, only this tenant's rows exist."""
    _bound.set(str(tenant_id))


def bind_operator() -> None:
    """From here on every tenant's rows exist: for the operator's own pages."""
    _bound.set(EVERYBODY)


@contextmanager
def bound_to(value: str) -> Iterator[None]:
    """For the block: a tenant's private id as text, EVERYBODY, or NOBODY_YET."""
    token = _bound.set(value)
    try:
        yield
    finally:
        _bound.reset(token)


def install() -> None:
    """Makes every connection of this process carry whose rows it may see. Costs one statement per connection taken
    from the pool, and one when it changes."""
    connection_created.connect(_on_connection, dispatch_uid="weir.row_security")


def uninstall() -> None:
    """As if `install` had not been called: for tests."""
    connection_created.disconnect(dispatch_uid="weir.row_security")
    for connection in connections.all(initialized_only=True):
        _without_guard(connection)


def _on_connection(connection: BaseDatabaseWrapper, **_: Any) -> None:
    if connection.vendor != "postgresql":
        return
    guard = _Guard(connection)
    _without_guard(connection)
    connection.execute_wrappers.append(guard)
    # A connection from the pool still carries the last one's.
    guard.tell(_bound.get())


def _without_guard(connection: BaseDatabaseWrapper) -> None:
    wrappers = connection.execute_wrappers
    wrappers[:] = [wrapper for wrapper in wrappers if not isinstance(wrapper, _Guard)]


class _Guard:
    """Tells a connection whose rows it may see, before the first statement after that has changed."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._told: str | None = None

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
    ) -> Any:
        wanted = _bound.get()
        if wanted != self._told:
            self.tell(wanted)
        return execute(sql, params, many, context)

    def tell(self, wanted: str) -> None:
        assert self._connection.connection is not None
        with self._connection.connection.cursor() as cursor:
            cursor.execute(_SET, [wanted])
        # A rollback would take it back: said inside a transaction, it is said again before the next statement.
        self._told = None if self._connection.in_atomic_block else wanted


# --- the policies -----------------------------------------------------------------------------------


def policies() -> dict[str, str]:
    """By table, which of its rows may be seen: an SQL condition."""
    found: dict[str, str] = {}
    below: list[type[models.Model]] = []
    for model in apps.get_models():
        if model._meta.app_label not in _APPS or not model._meta.managed:
            continue
        fields = {field.name: field for field in model._meta.concrete_fields}
        if model._meta.label == "tenants.Tenant":
            found[model._meta.db_table] = _condition("id", is_identity=True, may_be_null=False)
        elif "tenant" in fields:
            found[model._meta.db_table] = _condition(
                "tenant_id",
                is_identity=model._meta.app_label == "tenants",
                may_be_null=fields["tenant"].null,
            )
        else:
            below.append(model)
    for model in below:
        for field in model._meta.concrete_fields:
            parent = field.related_model
            if field.null or not isinstance(parent, type) or parent._meta.db_table not in found:
                continue
            # The parent's own policy holds inside.
            found[model._meta.db_table] = (
                f"EXISTS (SELECT FROM {parent._meta.db_table} AS parent "
                f"WHERE parent.{parent._meta.pk.column} = {model._meta.db_table}.{field.column})"
            )
            break
    return found


def _condition(column: str, *, is_identity: bool, may_be_null: bool) -> str:
    now = f"coalesce(current_setting('{VARIABLE}', true), '')"
    allowed = [f"{now} = '{EVERYBODY}'", f"{column}::text = {now}"]
    if is_identity:
        allowed.append(f"{now} = ''")
    if may_be_null:
        allowed.append(f"{column} IS NULL")
    return " OR ".join(allowed)


def make_policies(connection: BaseDatabaseWrapper) -> None:
    """Idempotent; takes a lock on a table only where something is missing or changed."""
    tables = set(connection.introspection.table_names())
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, obj_description(pg_policy.oid, 'pg_policy') FROM pg_policy "
            "JOIN pg_class ON pg_class.oid = polrelid WHERE polname = %s AND pg_table_is_visible(polrelid)",
            [_POLICY],
        )
        there = dict(cursor.fetchall())
        for table, condition in policies().items():
            if table not in tables or there.get(table) == condition:
                continue
            cursor.execute(f"DROP POLICY IF EXISTS {_POLICY} ON {table}")
            cursor.execute(f"CREATE POLICY {_POLICY} ON {table} USING ({condition})")
            cursor.execute(f"COMMENT ON POLICY {_POLICY} ON {table} IS %s", [condition])
            cursor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    close_partitions(connection)


def close_partitions(connection: BaseDatabaseWrapper) -> None:
    """A partition that is asked directly has policies of its own: none, so nobody but the owner sees a row."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class part ON part.oid = inhrelid "
            "JOIN pg_class parent ON parent.oid = inhparent "
            "WHERE part.relkind = 'r' AND parent.relrowsecurity AND NOT part.relrowsecurity"
        )
        for (partition,) in cursor.fetchall():
            cursor.execute(f"ALTER TABLE {partition} ENABLE ROW LEVEL SECURITY")


def after_migrate(using: str, **_: Any) -> None:
    """A receiver of post_migrate: a new table has its policy from the migration on that makes it."""
    make_policies(connections[using])
