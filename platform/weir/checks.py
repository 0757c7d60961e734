"""Deployment mistakes, as Django system checks with ids and hints. `manage.py check --deploy` runs them all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from django.apps.config import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register


@register(Tags.security)
def several_machines_share_secrets(
    app_configs: Sequence[AppConfig] | None, **_kwargs: Any
) -> list[CheckMessage]:
    if settings.DATABASE_IS_EMBEDDED or not settings.SECRETS_ARE_GENERATED:
        return []
    return [
        Warning(
            "DATABASE_URL names a shared database, but this process made its own secrets.",
            hint="Set WEIR_SECRET_KEY and WEIR_API_KEY_PEPPER (or their _FILE variants) to the same values "
            "for every process: another gateway can't read sessions or API keys of this one.",
            id="weir.W001",
        )
    ]


@register(Tags.security)
def secrets_are_private(app_configs: Sequence[AppConfig] | None, **_kwargs: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for path in sorted((settings.VAR_DIR / "secrets").glob("*")):
        if path.stat().st_mode & 0o077:
            found.append(Error(f"Others can read {path}.", hint=f"chmod 600 {path}", id="weir.E001"))
    return found


@register(Tags.security, deploy=True)
def debug_is_off(app_configs: Sequence[AppConfig] | None, **_kwargs: Any) -> list[CheckMessage]:
    if not settings.DEBUG:
        return []
    return [Error("WEIR_DEBUG is on: errors show settings and code.", hint="Unset it.", id="weir.E002")]


@register(Tags.security, deploy=True)
def people_come_over_https(app_configs: Sequence[AppConfig] | None, **_kwargs: Any) -> list[CheckMessage]:
    local = any(f"://{host}" in settings.BASE_URL for host in ("localhost", "127.0.0.1", "[::1]"))
    if local or settings.BASE_URL.startswith("https://"):
        return []
    return [
        Warning(
            f"API keys and sessions travel unencrypted to {settings.BASE_URL}.",
            hint="Put a proxy that terminates TLS in front and set WEIR_BASE_URL to its https address.",
            id="weir.W002",
        )
    ]


@register(Tags.database)
def embedded_servers_are_for_one_machine(
    app_configs: Sequence[AppConfig] | None, **_kwargs: Any
) -> list[CheckMessage]:
    if not settings.DATABASE_IS_EMBEDDED or not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return []
    return [
        Error(
            "DATABASE_URL is not set, and this runs in a cluster, where an embedded database is lost with its pod.",
            hint="Set DATABASE_URL and REDIS_URL.",
            id="weir.E003",
        )
    ]
