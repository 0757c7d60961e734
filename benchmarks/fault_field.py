"""What runs while things die, the clients that stream from it, and the judge of what they got."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from benchmarks.fleet import MODEL, ROOT, START_S, WorkerProcess
from engine_worker.broker import GatewayBroker, keys
from weir import embedded

OnToken = Callable[[str, int], Awaitable[None]]

rng = random.Random(100)


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    seed: int
    """0 is greedy."""


@dataclass(slots=True)
class Answer:
    ask: Ask
    request_id: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    resumed: int = 0
    error: str = ""


@dataclass
class Gateway:
    env: dict[str, str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "daphne", "-b", "127.0.0.1", "-p", str(self.port), "weir.asgi:application"],
                cwd=ROOT, env=self.env, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    async def ready(self) -> None:
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (
                        await client.get(f"http://127.0.0.1:{self.port}/login/", timeout=10)
                    ).status_code < 500:
                        return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the gateway does not answer\n{self.log.read_text()[-3000:]}")
                await asyncio.sleep(0.2)


@dataclass
class Field:
    """Everything that runs, and what came of it."""

    redis_url: str
    scratch: Path
    gateways: list[Gateway]
    workers: list[WorkerProcess]
    broker: GatewayBroker
    secret: str
    tokens: int
    valkey: subprocess.Popen[bytes]
    valkey_server: embedded.Server
    postgres: subprocess.Popen[bytes]
    postgres_server: embedded.Server
    expected: dict[Ask, Answer] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    by_fault: dict[str, Counter[str]] = field(default_factory=dict)

    # -- the client

    async def ask(self, asked: Ask, *, first: int = 0, on_token: OnToken | None = None) -> Answer:
        """Streams one answer, through whichever gateway lives, until its end."""
        answer = Answer(asked)
        last_id, event_id, deadline = "", "", time.monotonic() + 600
        for gateway in itertools.cycle(self.gateways[first:] + self.gateways[:first]):
            if time.monotonic() > deadline:
                answer.error = answer.error or "it did not end in time"
                break
            url = f"http://127.0.0.1:{gateway.port}/v1"
            headers = {"Authorization": f"Bearer {self.secret}", "x-weir-resume-grace": "60"}
            body = {
                "model": MODEL, "prompt": list(asked.prompt), "max_tokens": self.tokens, "ignore_eos": True,
                "stream": True, "temperature": 1.0 if asked.seed else 0.0, "seed": asked.seed,
            }  # fmt: skip
            try:
                async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(60, connect=5)) as client:
                    call = (
                        client.stream(
                            "GET",
                            f"{url}/requests/{answer.request_id}/stream",
                            headers={"Last-Event-ID": last_id},
                        )
                        if answer.request_id
                        else client.stream("POST", f"{url}/completions", json=body)
                    )
                    async with call as response:
                        if response.status_code >= 500 or response.status_code == 429:
                            await asyncio.sleep(0.5)
                            continue
                        if response.status_code != 200:
                            answer.error = (await response.aread()).decode()
                            break
                        async for line in response.aiter_lines():
                            if line.startswith("id: "):
                                event_id = line[4:]
                            if not line.startswith("data: "):
                                continue
                            if line == "data: [DONE]":
                                answer.error = ""
                                return await self._with_tokens(answer)
                            data = json.loads(line[6:])
                            if "error" in data:
                                answer.error = json.dumps(data["error"])
                                return await self._with_tokens(answer)
                            answer.request_id, last_id = data["id"], event_id
                            answer.text += "".join(choice["text"] for choice in data["choices"])
                            if on_token is not None:
                                await on_token(answer.request_id, int(event_id.partition(".")[0] or 0))
            except httpx.TransportError:
                pass
            answer.resumed += 1
            await asyncio.sleep(0.05)
        return await self._with_tokens(answer)

    async def _with_tokens(self, answer: Answer) -> Answer:
        log = await self.broker.read_log(MODEL, answer.request_id)
        answer.tokens = tuple(token for chunk in log for token in chunk.token_ids)
        self.answers.append(answer)
        return answer

    def judge(self, fault: str, answers: Sequence[Answer]) -> None:
        counts = self.by_fault.setdefault(fault, Counter())
        for answer in answers:
            good = self.expected[answer.ask]
            counts["streams"] += 1
            counts["resumed"] += answer.resumed > 0
            if (answer.text, answer.tokens) == (good.text, good.tokens):
                continue
            # By the tokens where they differ, else by what the client was told of them.
            size = len(answer.tokens) - len(good.tokens)
            if answer.tokens == good.tokens:
                size = len(answer.text) - len(good.text)
            verdict = "lost" if size < 0 else "doubled" if size > 0 else "changed"
            counts[verdict] += 1
            self.counts[verdict] += 1
            print(f"    {verdict}: {answer.request_id} {size} {answer.error}", flush=True)

    async def streams(self, count: int, *, first: int = 0, on_token: OnToken | None = None) -> list[Answer]:
        """So many at once, the first with `on_token`."""
        asks = rng.sample(list(self.expected), count)
        calls = [self.ask(a, first=first, on_token=None if n else on_token) for n, a in enumerate(asks)]
        return await asyncio.gather(*calls)

    # -- the fleet

    async def owner(self, request_id: str) -> WorkerProcess | None:
        async with Redis.from_url(self.redis_url, protocol=2) as client:
            found: Any = await client.hget(f"{keys.model_prefix(MODEL)}req:{request_id}", "worker")
        named = found.decode() if found else ""
        return next((worker for worker in self.workers if worker.worker_id == named), None)

    async def have_workers(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while True:
            alive = {status.worker_id for status in await self.broker.workers()}
            running = [
                w for w in self.workers if w.process and w.process.poll() is None and w.worker_id in alive
            ]
            if len(running) >= count:
                return
            if time.monotonic() > deadline:
                found = [worker.log for worker in self.workers if worker.log.exists()]
                logs = "".join(log.read_text(errors="replace")[-600:] for log in found)
                raise TimeoutError(f"fewer than {count} workers came up\n{logs}")
            await asyncio.sleep(0.1)


def at_token(number: int, act: Callable[[str], Awaitable[None]]) -> OnToken:
    """Does it once, when the stream has come so far."""
    is_done = False

    async def on_token(request_id: str, seen: int) -> None:
        nonlocal is_done
        if not is_done and seen >= number:
            is_done = True
            await act(request_id)

    return on_token


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
