"""A person who signs in. People belong to tenants by membership; operators are staff."""

from __future__ import annotations

from typing import Any, ClassVar

import uuid_utils.compat
from django.contrib.auth.models import AbstractUser
from django.contrib.auth.models import UserManager as DjangoUserManager
from django.db import models


class UserManager(DjangoUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **extra: Any) -> User:  # type: ignore[override]
        return super()._create_user(username=email, email=email, password=password, **extra)  # type: ignore[attr-defined]


class User(AbstractUser):
    username = None  # type: ignore[assignment]
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    email = models.EmailField(unique=True)

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []
