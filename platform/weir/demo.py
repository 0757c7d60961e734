"""A first start: a migrated database, and the demo's operator, tenant and key, or the link to make them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from django.core.management import call_command
from django.db import connection

from tenants.services import DEMO_SCOPES, ensure_demo
from tenants.services.audit import Actor
from tenants.services.demo import DEMO_EMAIL
from tenants.services.first_run import LINK_HOURS, has_operator, setup_link


@dataclass(frozen=True, slots=True)
class Login:
    email: str
    file: Path
    """Where people and scripts look; before everything answers for the first time it is not there."""

    @property
    def draft(self) -> Path:
        """Holds the secrets until then: they are told once, and a start may be stopped."""
        return self.file.with_name(".demo.env.starting")

    def publish(self) -> None:
        self.draft.replace(self.file)


def prepare_database(var_dir: Path, base_url: str, *, with_demo: bool = True) -> Login | str:
    """Migrates, makes what is missing of the demo, and keeps its secrets for `demo.env`: see Login.

    The database keeps only hashes: where the file is gone, a new key and a new password are made. Without the demo,
    returns the link to the first run, or "" where there is an operator.
    """
    try:
        call_command("migrate", interactive=False, verbosity=0)
        if not with_demo:
            return "" if has_operator() else setup_link()
        login = Login(email=DEMO_EMAIL, file=var_dir / "demo.env")
        known = known_logins(login.draft) | known_logins(login.file)
        demo = ensure_demo(
            actor=Actor.system("weir up"),
            new_key="WEIR_API_KEY" not in known,
            new_password="WEIR_ADMIN_PASSWORD" not in known,
        )
        password = demo.operator_password or known.get("WEIR_ADMIN_PASSWORD", "")
        _write(
            login.draft,
            {
                "WEIR_BASE_URL": base_url,
                "WEIR_API_KEY": demo.api_key or known.get("WEIR_API_KEY", ""),
                "WEIR_ADMIN_EMAIL": demo.operator_email,
                "WEIR_ADMIN_PASSWORD": password,
            },
        )
        return login
    finally:
        connection.close()
        # Not in the stubs of the base class: the pool is PostgreSQL's.
        connection.close_pool()  # type: ignore[attr-defined]


def welcome(base_url: str, model_name: str, var_dir: Path, login: Login | str) -> str:
    """What a person needs to know when everything answers."""
    if isinstance(login, str):
        setup = f"\n  Set up    {login}\n            (for {LINK_HOURS} hours, and until there is an operator)"
        return f"""
Weir is ready.
{setup if login else ""}
  Console   {base_url}/
  Docs      {base_url}/docs/

Ctrl-C stops it; what it stored stays in {var_dir}.
"""
    file = os.path.relpath(login.file) if login.file.is_relative_to(Path.cwd()) else str(login.file)
    return f"""
Weir is ready.

  Console   {base_url}/           sign in as {login.email}, the password is in {file}
  Chat      {base_url}/chat/
  Docs      {base_url}/docs/
  Admin     {base_url}/admin/
  API key   in {file} too; its scopes are {", ".join(DEMO_SCOPES)}

  . {shlex.quote(file)}
  curl -N $WEIR_BASE_URL/v1/chat/completions -H "Authorization: Bearer $WEIR_API_KEY" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model_name}", "stream": true, "temperature": 0.2, "max_tokens": 300,
         "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

Ctrl-C stops it; what it stored stays in {os.path.relpath(var_dir) if file[0] != "/" else var_dir}.
"""


def known_logins(file: Path) -> dict[str, str]:
    """What an earlier start wrote there, by name."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    pairs = (
        shlex.split(line)[0].partition("=") for line in lines if "=" in line and not line.startswith("#")
    )
    return {name: value for name, _, value in pairs if value}


def _write(file: Path, values: dict[str, str]) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write("# Made by `weir up`. Secrets: keep this file to yourself.\n")
        stream.writelines(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    draft.replace(file)
