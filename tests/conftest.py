"""What every test gets."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _fast_passwords(settings: Any) -> None:
    # Real hashing costs half a second per person on a busy machine, and no test is about its strength.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
