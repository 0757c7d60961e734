"""`weir restore FOLDER`: what `weir backup` wrote, into an empty database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from weir.backup import restore_backup


class Command(BaseCommand):
    help = (
        "Restores a backup into an empty database, then records the usage that was on its way to the ledger."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *_args: Any, **options: Any) -> None:
        restored = restore_backup(options["folder"])
        self.stdout.write(
            f"restored what was kept at {restored['made_at']}: {restored['usage_events']} usage events added"
        )
        if restored["parked"]:
            self.stdout.write(
                f"{restored['parked']} of them name what the database does not have: see ParkedUsageEvent"
            )
        if not restored["secrets_restored"]:
            self.stdout.write(
                "secrets are the ones given now: with another pepper than before, no API key works"
            )
        self.stdout.write("next: manage.py migrate, manage.py reconcile, then start")
