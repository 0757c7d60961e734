"""manage.py reconcile: does everything that counts usage agree with the ledger?"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from inference.services.reconcile import counter_differences, ledger_differences


class Command(BaseCommand):
    help = "Proves that ledger, roll-ups and counters agree, and says where not. Ends with code 1 when they don't."

    def handle(self, *args: Any, **options: Any) -> None:
        differences = ledger_differences() + counter_differences(settings.REDIS_URL)
        for difference in differences:
            self.stdout.write(str(difference))
        if differences:
            raise CommandError(f"{len(differences)} differences")
        self.stdout.write("Ledger, roll-ups, recorded requests and budget counters agree.")
