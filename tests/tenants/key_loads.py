"""What tests of the key cache give it: a clock, the real loaders, counted, and what a client's secret comes to."""

from __future__ import annotations

from typing import Final

from django.conf import settings
from django.db import OperationalError

from tenants.key_format import KeySecret, digest_key, parse_key
from tenants.principal_selectors import StoredKey, find_stored_key, read_auth_epoch
from tenants.services import IssuedKey

PATIENT_S = 30.0
"""For the database to answer, where a test isn't about one that doesn't."""
PATIENT: Final = {"database_timeout_s": PATIENT_S, "known_wait_s": PATIENT_S}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class CountedLoads:
    """The real loaders, counted, and able to fail."""

    def __init__(self) -> None:
        self.keys = self.epochs = 0
        self.is_down = False

    def key(self, lookup_id: str) -> StoredKey | None:
        self.keys += 1
        self._check()
        return find_stored_key(lookup_id)

    def epoch(self):
        self.epochs += 1
        self._check()
        return read_auth_epoch()

    def _check(self) -> None:
        if self.is_down:
            raise OperationalError("the database is down")


def secret_of(issued: IssuedKey) -> tuple[str, bytes]:
    key = parse_key(issued.secret)
    assert isinstance(key, KeySecret)
    return key.lookup_id, digest_key(key, pepper=settings.API_KEY_PEPPER)
