"""manage.py reconcile: does everything that counts usage agree with the ledger?"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference.services.reconcile import counter_differences, ledger_differences
from inference.services.repair import correct_counters, rebuild_roll_ups


class Command(BaseCommand):
    help = "Proves that ledger, roll-ups and counters agree, and says where not. Ends with code 1 when they don't."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--repair",
            action="store_true",
            help="First make roll-ups, latencies and the list of requests anew from the ledger, and correct counters.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["repair"]:
            rebuild_roll_ups()
            for corrected in correct_counters(settings.REDIS_URL):
                self.stdout.write(f"Corrected: {corrected}")
        differences = ledger_differences() + counter_differences(settings.REDIS_URL)
        for difference in differences:
            self.stdout.write(str(difference))
        if differences:
            raise CommandError(f"{len(differences)} differences")
        self.stdout.write("Ledger, roll-ups, recorded requests and budget counters agree.")
