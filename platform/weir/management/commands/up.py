"""Starts the whole product on this machine. See weir/up.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from engine_worker.model_store import DEFAULT_MODEL
from weir import up
from weir.servers import SERVERS


class Command(BaseCommand):
    help = "Start everything on this machine: database, queue, model, gateway, background work, engine."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--server", choices=SERVERS, default=settings.SERVER, help="the gateway's; default WEIR_SERVER"
        )
        parser.add_argument(
            "--no-demo",
            action="store_true",
            help="no operator, tenant and key of its own: print a link to make them (WEIR_DEMO=false)",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        name = settings.MODEL_NAME or (
            DEFAULT_MODEL if settings.MODEL == DEFAULT_MODEL else Path(settings.MODEL).stem.lower()
        )
        plan = up.Plan(
            base_dir=settings.BASE_DIR,
            var_dir=settings.VAR_DIR,
            host=settings.BIND_HOST,
            port=settings.BIND_PORT,
            base_url=settings.BASE_URL,
            model=settings.MODEL,
            model_name=name,
            database_is_embedded=settings.DATABASE_IS_EMBEDDED,
            redis_is_embedded=settings.REDIS_IS_EMBEDDED,
            redis_url=settings.REDIS_URL,
            log_level=settings.LOG_LEVEL,
            server=options["server"],
            with_demo=settings.DEMO and not options["no_demo"],
        )
        up.run(plan)
