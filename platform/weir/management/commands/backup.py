"""`weir backup FOLDER`: everything that must not be lost, while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from weir.backup import make_backup


class Command(BaseCommand):
    help = "Writes the database, usage not yet in the ledger and the secrets to a new folder, while all runs."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *_args: Any, **options: Any) -> None:
        manifest = make_backup(options["folder"])
        self.stdout.write(f"{options['folder']}: database and {manifest['usage_events']} usage events")
        if not manifest["holds_secrets"]:
            self.stdout.write(
                "WEIR_SECRET_KEY and WEIR_API_KEY_PEPPER were given from outside: keep them yourself"
            )
