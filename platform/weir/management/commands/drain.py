"""`manage.py drain`: before a gateway is stopped, waits until what it answers has been answered."""

from __future__ import annotations

import re
import time
from typing import Any, Final

import httpx
from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

_IN_PROGRESS: Final = re.compile(r"^weir_http_requests_in_progress (\S+)$", re.MULTILINE)


class Command(BaseCommand):
    help = (
        "Waits until a gateway answers nothing any more, or the time is over. For a preStop hook: load balancers send "
        "nothing new by then, streams go on to their end, and SIGTERM cuts none. Needs WEIR_METRICS_TOKEN; without it "
        "it waits `--settle` alone."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--url", default=f"http://127.0.0.1:{settings.BIND_PORT}")
        parser.add_argument(
            "--settle", type=float, default=10.0, help="seconds until nobody sends new requests"
        )
        parser.add_argument("--timeout", type=float, default=300.0, help="seconds, all in all")

    def handle(self, *_args: Any, **options: Any) -> None:
        deadline = time.monotonic() + options["timeout"]
        time.sleep(min(options["settle"], options["timeout"]))
        while time.monotonic() < deadline and (open_requests := _in_progress(options["url"])):
            self.stdout.write(f"{open_requests} still open")
            time.sleep(1)


def _in_progress(url: str) -> int:
    """Requests being answered, but for the one that asks; 0 where the gateway does not tell."""
    headers = {"Authorization": f"Bearer {settings.METRICS_TOKEN}"}
    try:
        answer = httpx.get(f"{url}/metrics", headers=headers, timeout=10)
    except httpx.TransportError:
        return 0  # it has ended
    found = _IN_PROGRESS.search(answer.text)
    return max(0, round(float(found[1])) - 1) if found else 0
