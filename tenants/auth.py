"""A bearer key, or a member's session, to a Principal.

AuthError
├── AuthenticationFailed    the credentials won't do: 401 (403 for a suspended tenant)
│   ├── MissingKey
│   ├── InvalidKey
│   ├── RevokedKey
│   ├── ExpiredKey
│   ├── TenantSuspended
│   └── NetworkNotAllowed   the key is good, but not from this address: 403
├── NotAMember              the person does not belong to that tenant: 403
└── AuthUnavailable         the database is away and the key is not known here: 503, never 401
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, InterfaceError

from tenants.key_cache import KeyCache, KeyUnavailable
from tenants.key_format import digest_key, parse_key
from tenants.key_verdict import Verdict, judge
from tenants.models import Tenant, Tier, User
from tenants.principal import Principal
from tenants.principal_selectors import find_membership, member_principal, tiers_open_to
from tenants.row_security import NOBODY_YET, bound_to

_ANOTHER_KEY: Final = (
    "Make another in the console, under API keys, or ask an owner or admin of your tenant for one."
)


class AuthError(Exception):
    """`code` is stable and for programs, the message is for people, `status` is HTTP's."""

    code: ClassVar[str] = "auth_error"
    status: ClassVar[int] = 401
    message: ClassVar[str] = "Authentication failed. Send an API key as 'Authorization: Bearer KEY'."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.message)


class AuthenticationFailed(AuthError):
    pass


class MissingKey(AuthenticationFailed):
    code = "missing_api_key"
    message = "You did not provide an API key. Send it as 'Authorization: Bearer KEY'."


class InvalidKey(AuthenticationFailed):
    code = "invalid_api_key"
    message = (
        f"The API key is not valid: it is none of this server's, or was not copied whole. {_ANOTHER_KEY}"
    )


class RevokedKey(AuthenticationFailed):
    code = "api_key_revoked"
    message = f"The API key has been revoked, and will not work again. {_ANOTHER_KEY}"


class ExpiredKey(AuthenticationFailed):
    code = "api_key_expired"
    message = f"The API key has expired. {_ANOTHER_KEY}"


class TenantSuspended(AuthenticationFailed):
    code = "tenant_suspended"
    status = 403
    message = "This tenant is suspended. Ask your operator."


class NetworkNotAllowed(AuthenticationFailed):
    code = "network_not_allowed"
    status = 403
    message = (
        "The API key may not be used from this address. Use it from one of its networks, or ask an owner or admin of "
        "the tenant for a key that is not bound to them."
    )


class NotAMember(AuthError):
    code = "not_a_member"
    status = 403
    message = "You are not a member of this tenant. Choose one of yours, or ask an owner or admin of it to invite you."


class TierNotOpen(AuthError):
    code = "tier_not_open"
    status = 403
    message = "This tenant's requests can't go in that tier: leave it out, or name another."


class AuthUnavailable(AuthError):
    code = "auth_unavailable"
    status = 503
    message = "Keys can't be checked at the moment. Try again shortly."


_REFUSALS: dict[Verdict, type[AuthenticationFailed]] = {
    Verdict.INVALID: InvalidKey,
    Verdict.REVOKED: RevokedKey,
    Verdict.EXPIRED: ExpiredKey,
    Verdict.SUSPENDED: TenantSuspended,
}

# A cache per event loop: its locks belong to one. Servers have one loop; tests and tools may have several.
_caches: WeakKeyDictionary[asyncio.AbstractEventLoop, KeyCache] = WeakKeyDictionary()


async def authenticate_bearer(token: str | None, address: str | None = None) -> Principal:
    """The principal of an API key, given without the word `Bearer`, for a client at that IP address. No query when
    the key is warm.

    Raises AuthenticationFailed or AuthUnavailable.
    """
    if not token or not token.strip():
        raise MissingKey
    key = parse_key(token.strip())
    if key is None:
        raise InvalidKey
    loop = asyncio.get_running_loop()
    cache = _caches.get(loop)
    if cache is None:
        cache = _caches[loop] = KeyCache()
    digest = digest_key(key, pepper=settings.API_KEY_PEPPER)
    try:
        stored = await cache.get(key.lookup_id, digest)
    except KeyUnavailable as error:
        raise AuthUnavailable from error
    verdict = judge(stored, digest)
    if verdict is not Verdict.GOOD:
        raise _REFUSALS[verdict]
    assert stored is not None
    if not stored.is_allowed_from(address):
        raise NetworkNotAllowed
    return stored.principal


async def principal_for_member(
    user: User, tenant_public_id: str | None = None, tier: str | None = None
) -> Principal:
    """The principal of a signed-in person in the named tenant, or in their first; in a lesser tier if one is named.

    Raises NotAMember, TenantSuspended, TierNotOpen or AuthUnavailable.
    """
    return await sync_to_async(_principal_for_member)(user, tenant_public_id, tier)


def _principal_for_member(user: User, tenant_public_id: str | None, tier: str | None) -> Principal:
    # Which tenant it is, is what is looked for: a socket may have been another's before.
    with bound_to(NOBODY_YET):
        return _found_principal(user, tenant_public_id, tier)


def _found_principal(user: User, tenant_public_id: str | None, tier: str | None) -> Principal:
    try:
        membership = find_membership(user, tenant_public_id) if user.is_active else None
        if membership is None:
            raise NotAMember
        if membership.tenant.is_suspended:
            raise TenantSuspended
        return member_principal(membership, user, _chosen_tier(membership.tenant, tier))
    except (DatabaseError, InterfaceError) as error:
        raise AuthUnavailable from error


def _chosen_tier(tenant: Tenant, name: str | None) -> Tier:
    if name is None or name == tenant.tier.name:
        return tenant.tier
    is_open = {tier.name: tier for tier in tiers_open_to(tenant)}
    if name not in is_open:
        raise TierNotOpen(
            f"This tenant's requests can't go in that tier: only in its own, or one after it: {', '.join(is_open)}."
        )
    return is_open[name]
