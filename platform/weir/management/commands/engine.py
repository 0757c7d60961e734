"""`manage.py engine ...`: one more engine worker on this machine, at the queue that the settings name."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand

from weir import places
from weir.errors import StartError


class Command(BaseCommand):
    help = (
        "`python -m engine_worker` with all that is given, where REDIS_URL, or the Valkey of `make run`, is."
    )

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        # Not add_arguments: they are the worker's own, and so is --help.
        if settings.REDIS_IS_EMBEDDED and not places.valkey_socket(settings.VAR_DIR).exists():
            raise StartError(
                "REDIS_URL is not set and the embedded servers are not running: start `make run` first"
            )
        env = dict(os.environ) | {"REDIS_URL": settings.REDIS_URL, "WEIR_VAR_DIR": str(settings.VAR_DIR)}
        env.pop("REDIS_URL_FILE", None)  # read already
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(settings.BASE_DIR), env.get("PYTHONPATH"))))
        os.execve(sys.executable, [sys.executable, "-m", "engine_worker", *argv[2:]], env)  # noqa: S606 - ourselves
