"""`weir doctor`: what is wrong, and what to do."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from weir.doctor import examine


class Command(BaseCommand):
    help = "Examines database, Redis, workers, gateway and settings. Ends with 1 if something does not work."
    # A broken setting is a finding like the others.
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        worst = "ok"
        for finding in examine():
            self.stdout.write(f"{finding.level.upper():8} {finding.part}: {finding.text}")
            if finding.what_to_do:
                self.stdout.write(f"{'':8} -> {finding.what_to_do}")
            if finding.level == "error" or worst == "ok":
                worst = finding.level
        if worst == "error":
            sys.exit(1)
