"""Is this key good, right now? Pure, so that cache and loader judge alike."""

from __future__ import annotations

import hmac
from enum import Enum, auto

from django.utils import timezone

from tenants.principal_selectors import StoredKey


class Verdict(Enum):
    GOOD = auto()
    INVALID = auto()
    REVOKED = auto()
    EXPIRED = auto()
    SUSPENDED = auto()


_NO_DIGEST = bytes(32)


def judge(stored: StoredKey | None, digest: bytes) -> Verdict:
    """The digest first, in constant time: who does not hold the secret learns nothing else of the key."""
    current = hmac.compare_digest(stored.digest if stored else _NO_DIGEST, digest)
    previous = hmac.compare_digest((stored and stored.previous_digest) or _NO_DIGEST, digest)
    if stored is None or not (current or (previous and stored.previous_until is not None)):
        return Verdict.INVALID
    if stored.revoked_at is not None:
        return Verdict.REVOKED
    now = timezone.now()
    if stored.expires_at is not None and stored.expires_at <= now:
        return Verdict.EXPIRED
    if not current and stored.previous_until is not None and stored.previous_until <= now:
        return Verdict.EXPIRED
    if stored.tenant_suspended_at is not None:
        return Verdict.SUSPENDED
    return Verdict.GOOD
