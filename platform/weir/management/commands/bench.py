"""`weir bench`: loads an installation with a realistic mix and says what it gave."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import httpx
import msgspec
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from weir.load.client import Target, open_loop
from weir.load.mix import Mix
from weir.load.report import Objective, Report, summarise


class Command(BaseCommand):
    help = (
        "Sends chats to an installation at a steady rate, whatever it answers (Poisson arrivals, lengths like "
        "ShareGPT's from a seed), and prints throughput, latency and goodput. Ends with 1 if something was lost or "
        "failed. It makes real load, and costs what the key's owner pays."
    )
    # Another installation's database and settings are none of this command's business.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--url", default=settings.BASE_URL, help="default: WEIR_BASE_URL")
        parser.add_argument("--key", default=os.environ.get("WEIR_API_KEY"), help="default: $WEIR_API_KEY")
        parser.add_argument("--model", help="default: the first that the key may use")
        parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
        parser.add_argument("--duration", type=float, default=60.0, help="seconds in which requests are sent")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--prompt-tokens", type=float, default=161.0, help="mean")
        parser.add_argument("--output-tokens", type=float, default=338.0, help="mean")
        parser.add_argument("--most-tokens", type=int, default=1024, help="of a prompt, and of an answer")
        parser.add_argument("--ttft-slo", type=float, default=5.0, help="seconds to the first token")
        parser.add_argument("--itl-slo", type=float, default=0.5, help="mean seconds between two tokens")
        parser.add_argument(
            "--own-end", action="store_true", help="let the model end answers: for servers without ignore_eos"
        )
        parser.add_argument("--json", action="store_true", help="the figures as one line of JSON")

    def handle(self, *_args: Any, **options: Any) -> None:
        if not options["key"]:
            raise CommandError("give --key, or set WEIR_API_KEY (`. var/demo.env` has the demo's)")
        if options["rate"] <= 0 or options["duration"] <= 0:
            raise CommandError("--rate and --duration must be greater than 0")
        model = options["model"] or _first_model(options["url"], options["key"])
        mix = Mix(
            seed=options["seed"],
            prompt_mean=options["prompt_tokens"],
            output_mean=options["output_tokens"],
            most_tokens=options["most_tokens"],
        )
        target = Target(options["url"], [options["key"]], model, fixed_length=not options["own_end"])
        objective = Objective(options["ttft_slo"], options["itl_slo"])
        if not options["json"]:
            self.stdout.write(
                f"{model} at {target.url}: {options['rate']:g} requests/s for {options['duration']:g} s, "
                f"seed {mix.seed}; good: TTFT <= {objective.ttft_s:g} s and mean ITL <= {objective.itl_s:g} s"
            )
        outcomes = asyncio.run(open_loop(target, mix.poisson(options["rate"], options["duration"])))
        report = summarise(outcomes, duration_s=options["duration"], objective=objective)
        self._tell(report, {outcome.error for outcome in outcomes if outcome.error}, as_json=options["json"])
        if report.failed or report.lost:
            sys.exit(1)

    def _tell(self, report: Report, errors: set[str], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(msgspec.json.encode(report.as_json()).decode())
            return
        for line in report.lines():
            self.stdout.write(line)
        for error in sorted(errors)[:5]:
            self.stdout.write(f"  {error}")


def _first_model(url: str, key: str) -> str:
    """Raises CommandError, with what to do."""
    models = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        answer = httpx.get(models, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        answer.raise_for_status()
        served = [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{models} does not list models: {error}") from error
    if not served:
        raise CommandError(f"{url} serves no model at the moment: start a worker, or name one by --model")
    return served[0]
