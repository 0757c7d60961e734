"""manage.py reconcile: does everything that counts usage agree with the ledger?"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from inference.services.reconcile import ledger_differences


class Command(BaseCommand):
    help = "Proves that ledger and roll-ups agree, and says where not. Ends with code 1 when they don't."

    def handle(self, *args: Any, **options: Any) -> None:
        differences = ledger_differences()
        for difference in differences:
            self.stdout.write(str(difference))
        if differences:
            raise CommandError(f"{len(differences)} differences")
        self.stdout.write("Ledger, roll-ups and recorded requests agree.")
