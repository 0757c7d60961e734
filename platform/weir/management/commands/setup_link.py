"""`weir setup_link`: where the first operator of an empty installation is made."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants.services.first_run import LINK_HOURS, has_operator, setup_link


class Command(BaseCommand):
    help = f"Prints a link that makes the first operator. It holds for {LINK_HOURS} hours, and until there is one."
    requires_system_checks = ()

    def handle(self, *_args: Any, **_options: Any) -> None:
        if has_operator():
            raise CommandError("there is an operator already; `manage.py createsuperuser` makes another")
        self.stdout.write(setup_link())
