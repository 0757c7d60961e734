"""Sends a mix to an OpenAI-compatible server and notes what became of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from typing import Any, Final

import httpx
import msgspec

from weir.load.mix import Ask

_ANSWER_S: Final = 600.0
"""A request without a byte for so long is lost."""


class End(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    """429, 503, or in a stream an error that says when to come back."""
    FAILED = "failed"
    """Any other error that says what it is."""
    LOST = "lost"
    """No answer, or one that stops without an end."""


@dataclass(slots=True)
class Outcome:
    """Times in seconds from the start of the run. Waiting counts from when the request was to be sent."""

    at_s: float
    end: End = End.LOST
    status: int = 0
    retry_after: bool = False
    request_id: str = ""
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_at_s: list[float] = field(default_factory=list)
    """Of each event that brought text."""
    finished_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0] - self.at_s if self.token_at_s else float("inf")

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens."""
        if not self.token_at_s or self.output_tokens < 2:
            return 0.0
        return (self.token_at_s[-1] - self.token_at_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.token_at_s, self.token_at_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    """With or without /v1."""
    keys: Sequence[str]
    """Requests take turns."""
    model: str
    fixed_length: bool = True
    """Asks for answers of exactly the drawn length (`ignore_eos`, which not every server knows)."""


class _Function(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Function | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)


async def open_loop(target: Target, asks: Iterable[Ask]) -> list[Outcome]:
    """Sends each at its time, whatever became of those before; returns when all have ended."""
    async with _client(target) as (client, keys):
        began = time.perf_counter()
        tasks: list[asyncio.Task[Outcome]] = []
        for number, ask in enumerate(asks):
            wait_s = began + ask.at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(
                asyncio.create_task(_one(client, next(keys), target, ask, began), name=f"ask-{number}")
            )
        return list(await asyncio.gather(*tasks))


async def closed_loop(
    target: Target, asks: Iterator[Ask], *, clients: int, duration_s: float
) -> list[Outcome]:
    """`clients` that each send the next request when the last one has ended."""
    outcomes: list[Outcome] = []
    async with _client(target) as (client, keys):
        began = time.perf_counter()

        async def visitor(key: str) -> None:
            while (now_s := time.perf_counter() - began) < duration_s:
                ask = next(asks)
                outcomes.append(
                    await _one(client, key, target, Ask(now_s, ask.prompt, ask.output_tokens), began)
                )

        await asyncio.gather(*(visitor(next(keys)) for _ in range(clients)))
    return outcomes


@asynccontextmanager
async def _client(target: Target) -> AsyncIterator[tuple[httpx.AsyncClient, Iterator[str]]]:
    async with httpx.AsyncClient(
        base_url=target.url.rstrip("/").removesuffix("/v1") + "/v1/",
        timeout=httpx.Timeout(_ANSWER_S, connect=60.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=20.0),
    ) as client:
        yield client, cycle(target.keys)


async def _one(client: httpx.AsyncClient, key: str, target: Target, ask: Ask, began: float) -> Outcome:
    outcome = Outcome(at_s=ask.at_s)
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.fixed_length:
        body["ignore_eos"] = True
    try:
        async with client.stream(
            "POST", "chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            outcome.status = answer.status_code
            outcome.retry_after = "retry-after" in answer.headers
            if answer.status_code != 200:
                outcome.error = (await answer.aread()).decode(errors="replace")[:300]
                outcome.end = End.REFUSED if answer.status_code in (429, 503, 529) else End.FAILED
            else:
                await _read(answer, outcome, began)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.finished_s = time.perf_counter() - began
    return outcome


async def _read(answer: httpx.Response, outcome: Outcome, began: float) -> None:
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            outcome.end = End.DONE
            return
        event = _EVENT.decode(line[6:])
        if event.error is not None:
            outcome.retry_after = "retry_after" in event.error
            outcome.end = End.REFUSED if outcome.retry_after else End.FAILED
            outcome.error = str(event.error)[:300]
            return
        outcome.request_id = event.id or outcome.request_id
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
        if any(choice.delta and choice.delta.content for choice in event.choices):
            outcome.token_at_s.append(time.perf_counter() - began)
