"""Requests that used up their attempts: see them, queue them again, or let them go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from engine_worker.broker import BrokerUnavailable, OperatorBroker, UnknownRequest


class Command(BaseCommand):
    help = (
        "List dead requests, queue some again (from where their answers broke off), or forget their prompts."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", choices=("list", "requeue", "drop"))
        parser.add_argument("request_ids", nargs="*", help="of one model; none with --all")
        parser.add_argument("--model", help="list only this one's; needed to requeue and drop")
        parser.add_argument("--all", action="store_true", help="every dead request of the model")
        # Ids may stand behind the options, too.
        parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["action"] != "list":
            if not options["model"]:
                raise CommandError("Say whose: --model NAME.")
            if bool(options["request_ids"]) == options["all"]:
                raise CommandError("Name the requests, or give --all.")
        try:
            async_to_sync(self._run)(**options)
        except BrokerUnavailable as error:
            raise CommandError(f"The queue can't be reached: {error}") from error

    async def _run(
        self, *, action: str, request_ids: list[str], model: str | None, all: bool, **_options: Any
    ) -> None:
        operator = OperatorBroker(settings.REDIS_URL)
        try:
            if action == "list":
                for name in [model] if model else await operator.models():
                    await self._list(operator, name)
                return
            assert model is not None
            if all:
                request_ids = [
                    letter.request_id for letter in await operator.dead_letters(model, limit=10**6)
                ]
                if not request_ids:
                    self._tell_that_none_is(model)
            verb = operator.requeue if action == "requeue" else operator.drop
            done = [await self._act(verb, model, request_id) for request_id in request_ids]
            if False in done:
                raise CommandError(f"{done.count(False)} of {len(done)} requests were left as they are.")
        finally:
            await operator.aclose()

    async def _list(self, operator: OperatorBroker, model: str) -> None:
        letters = await operator.dead_letters(model, limit=1000)
        if not letters:
            self._tell_that_none_is(model)
        for letter in letters:
            died_at = datetime.fromtimestamp(letter.died_at_ms / 1000, tz=UTC)
            self.stdout.write(
                f"{died_at:%Y-%m-%d %H:%M:%S}  {letter.model}  {letter.request_id}  tenant {letter.tenant_id}  "
                f"{letter.attempts} attempts, {letter.tokens} tokens  {letter.error_code}: {letter.error_message}"
            )

    def _tell_that_none_is(self, model: str) -> None:
        self.stderr.write(f"{model}: none is dead")

    async def _act(self, verb: Callable[[str, str], Awaitable[bool]], model: str, request_id: str) -> bool:
        """Whether it was one that is dead."""
        try:
            done = await verb(model, request_id)
        except UnknownRequest:
            self.stderr.write(f"{request_id}: unknown, or its day is over")
            return False
        self.stdout.write(f"{request_id}: {'done' if done else 'is not dead'}")
        return done
