"""The command line: Django's management commands, with errors a person can act on.

`manage.py COMMAND` and `weir COMMAND` are the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from django.db import OperationalError

from weir import places
from weir.environment import BadEnvironment
from weir.errors import StartError


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    try:
        execute_from_command_line(sys.argv)
    except (StartError, BadEnvironment, ImproperlyConfigured) as error:
        sys.exit(f"weir: {error}")
    except OperationalError as error:
        if _embedded_is_stopped():
            sys.exit(
                "weir: DATABASE_URL is not set and the embedded servers are not running: start `make run` first"
            )
        sys.exit(f"weir: the database does not answer: {error}")


def _embedded_is_stopped() -> bool:
    from django.conf import settings

    embedded: bool = settings.DATABASE_IS_EMBEDDED
    return embedded and not any(places.postgres_socket_dir(settings.VAR_DIR).glob(".s.PGSQL.*"))
