"""What each role of a tenant may do: the one table, for code, pages, docs and tests."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from tenants.models import Role
from tenants.principal import Scope


class Right(StrEnum):
    READ = "see keys, usage, cost, requests and statements"
    INFER = "chat"
    MANAGE_KEYS = "make, rotate and revoke keys, projects and service accounts"
    MANAGE_MEMBERS = "invite, change and remove members other than owners"
    MANAGE_OWNERS = "make owners, change and remove them"
    EXPORT_DATA = "take a copy of all data"
    DELETE_TENANT = "delete the tenant, and restore it while that is possible"


RIGHTS: Final[dict[Role, frozenset[Right]]] = {
    Role.OWNER: frozenset(Right),
    Role.ADMIN: frozenset({Right.READ, Right.INFER, Right.MANAGE_KEYS, Right.MANAGE_MEMBERS}),
    Role.DEVELOPER: frozenset({Right.READ, Right.INFER}),
    Role.VIEWER: frozenset({Right.READ}),
    Role.BILLING: frozenset({Right.READ}),  # and alerts about budgets are mailed to it
}

_SCOPES: Final[dict[Right, frozenset[Scope]]] = {
    Right.READ: frozenset({Scope.USAGE_READ}),
    Right.INFER: frozenset({Scope.INFERENCE}),
    Right.MANAGE_KEYS: frozenset({Scope.KEYS_WRITE, Scope.ADMIN}),
}

SCOPES_BY_ROLE: Final[dict[Role, frozenset[Scope]]] = {
    role: frozenset(scope for right in rights for scope in _SCOPES.get(right, ()))
    for role, rights in RIGHTS.items()
}
"""The same in the words of API keys."""


def may_give(role: Role, other: Role) -> bool:
    """Whether who has `role` may make someone `other`, or take that from them."""
    needed = Right.MANAGE_OWNERS if other is Role.OWNER else Right.MANAGE_MEMBERS
    return needed in RIGHTS[role]
