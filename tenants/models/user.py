"""A person who signs in. People belong to tenants by membership; operators are staff."""

from __future__ import annotations

from typing import Any, ClassVar

import uuid_utils.compat
from django.contrib.auth.models import AbstractUser, BaseUserManager
from django.db import models
from django.db.models.functions import Lower


class LoginEmailField(models.EmailField):  # type: ignore[type-arg]  # not subscriptable at run time
    """An address that is stored and looked up in lower case: `Ada@x` and `ada@x` are one person."""

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        return value.strip().lower() if isinstance(value, str) else value

    def to_python(self, value: Any) -> Any:
        value = super().to_python(value)
        return value.strip().lower() if isinstance(value, str) else value

    def deconstruct(self) -> Any:
        # Migrations import no app code: to them it is a plain EmailField.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.EmailField", args, kwargs


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **extra: Any) -> User:
        """Without a password the account can't sign in by one."""
        if not email.strip():
            raise ValueError("a user needs an e-mail address")
        user = self.model(email=email.strip().lower(), **extra)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **extra: Any) -> User:
        return self.create_user(email, password, **{"is_staff": True, "is_superuser": True, **extra})

    def get_by_natural_key(self, username: str | None) -> User:
        return self.get(email=username or "")


class User(AbstractUser):
    username = None  # type: ignore[assignment]  # AbstractUser has one, people here sign in by e-mail
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    email = LoginEmailField(unique=True)

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects: ClassVar[UserManager] = UserManager()  # type: ignore[assignment]  # AbstractUser's wants a username

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(email=Lower("email")), name="user_email_is_lower_case"),
        ]

    def __str__(self) -> str:
        return str(self.email)
