"""The one reader of the environment: typed, `_FILE` variants for secrets, errors that name the variable."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from environs import Env, EnvError


class BadEnvironment(Exception):
    """A variable is missing or malformed; the message names it and says what it should be."""


class Environment:
    """Reads variables and remembers their names, so that a test can compare them with `.env.example`."""

    def __init__(self) -> None:
        self._env = Env()
        self.names: set[str] = set()

    def text(self, name: str, default: str) -> str:
        self.names.add(name)
        return os.environ.get(name) or default

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise BadEnvironment(f"{name} is {value!r}, but should be one of {', '.join(choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        self.names.add(name)
        if not os.environ.get(name):
            return default
        try:
            return self._env.bool(name)
        except EnvError as error:
            raise BadEnvironment(f"{name} is {os.environ[name]!r}, but should be true or false") from error

    def number(self, name: str, default: int, *, least: int, most: int) -> int:
        self.names.add(name)
        if not os.environ.get(name):
            return default
        try:
            value = self._env.int(name)
        except EnvError as error:
            raise BadEnvironment(f"{name} is {os.environ[name]!r}, but should be a whole number") from error
        if not least <= value <= most:
            raise BadEnvironment(f"{name} is {value}, but should be from {least} to {most}")
        return value

    def items(self, name: str, default: list[str]) -> list[str]:
        self.names.add(name)
        text = os.environ.get(name)
        return [part.strip() for part in text.split(",") if part.strip()] if text else default

    def path(self, name: str, default: Path) -> Path:
        self.names.add(name)
        text = os.environ.get(name)
        return Path(text).expanduser().absolute() if text else default

    def secret(self, name: str) -> str | None:
        """The value of NAME, or the content of the file that NAME_FILE names; never both."""
        self.names |= {name, f"{name}_FILE"}
        value, file = os.environ.get(name), os.environ.get(f"{name}_FILE")
        if value and file:
            raise BadEnvironment(f"{name} and {name}_FILE are both set: keep one")
        if not file:
            return value or None
        try:
            content = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadEnvironment(f"{name}_FILE names {file}, which can't be read: {error}") from error
        if not content:
            raise BadEnvironment(f"{name}_FILE names {file}, which is empty")
        return content


def generated_secret(path: Path, name: str) -> str:
    """The secret kept in `path`, made on first use: for one machine, where nobody gave one by `name`."""
    try:
        return path.read_text(encoding="ascii").strip() or _refuse_empty(path, name)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BadEnvironment(f"{name} is not set, and {path} can't be read: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Written beside its place and linked into it: of two first starts one wins, and neither reads half a secret.
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with open(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii"
        ) as file:
            file.write(secrets.token_urlsafe(48))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise BadEnvironment(f"{name} is not set, and {path} can't be written: {error}") from error
    return path.read_text(encoding="ascii").strip()


def _refuse_empty(path: Path, name: str) -> str:
    raise BadEnvironment(f"{name} is not set, and {path} is empty: delete the file or set the variable")
