"""What is lost when things die: tokens, and rows in the ledger.

    make bench-faults                          # 100 rounds and six more faults, about 20 minutes on two cores
    make bench-faults ARGS="--rounds 3 --outage 5"

Real PostgreSQL, real Valkey with its log on, two real gateways, four real workers with the real engine
and a tiny random model; clients stream over HTTP and come back with Last-Event-ID when a connection
breaks. Half of the streams are greedy, half sample with a seed. Each is compared, by its text at the
client and by its token ids in the log, with what the same request gave before anything was disturbed.

    worker-killed    kill -9 of the worker that owns a stream, at a random token; `--rounds` times
    worker-paused    SIGSTOP beyond its lease, then on
    worker-cut       its connection to Valkey breaks, for longer than its lease
    gateway-killed   kill -9; the clients go on through the other one
    valkey-killed    kill -9 and start again
    valkey-full      its memory limit is reached for some seconds
    postgres-down    stopped for `--outage` seconds, under load

lost, doubled, changed count streams that came back shorter, longer, different; ledger_missing and
ledger_surplus count rows (one per request, with its exact tokens). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from benchmarks.engine.measure import processor
from benchmarks.fleet import MODEL, ROOT, START_S, WorkerProcess, tiny_model, wait_for_workers
from engine_worker.broker import GatewayBroker, keys
from tests.engine_worker.broker.wire import Wire
from weir import embedded

LEASE_MS = 1500
WORKERS = 4
STREAMS = 4
OnToken = Callable[[str, int], Awaitable[None]]

rng = random.Random(100)  # noqa: S311


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
        last_id, event_id, deadline = "", "", time.monotonic() + 120
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
                                await on_token(answer.request_id, int(event_id.rstrip(".") or 0))
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
            sizes = (len(answer.text) - len(good.text), len(answer.tokens) - len(good.tokens))
            verdict = "lost" if min(sizes) < 0 else "doubled" if max(sizes) > 0 else "changed"
            counts[verdict] += 1
            self.counts[verdict] += 1
            print(f"    {verdict}: {answer.request_id} {sizes} {answer.error}", flush=True)

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
                logs = "".join(worker.log.read_text(errors="replace")[-600:] for worker in self.workers)
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


async def worker_killed(it: Field) -> None:
    await it.have_workers(2)

    async def kill(request_id: str) -> None:
        if (worker := await it.owner(request_id)) is not None:
            worker.kill()
            worker.start()
            it.by_fault.setdefault("worker-killed", Counter())["kills"] += 1

    it.judge(
        "worker-killed", await it.streams(STREAMS, on_token=at_token(rng.randrange(1, it.tokens // 2), kill))
    )


async def worker_paused(it: Field) -> None:
    await it.have_workers(2)
    later: list[asyncio.Task[None]] = []

    async def pause(request_id: str) -> None:
        if (worker := await it.owner(request_id)) is not None:
            worker.send(signal.SIGSTOP)

            async def go_on() -> None:
                await asyncio.sleep(3 * LEASE_MS / 1000)
                worker.send(signal.SIGCONT)

            later.append(asyncio.create_task(go_on(), name="sigcont"))

    it.judge("worker-paused", await it.streams(STREAMS, on_token=at_token(it.tokens // 4, pause)))
    await asyncio.gather(*later)


async def worker_cut(it: Field) -> None:
    """All others pause, so that the streams are this worker's when its connection breaks."""
    directory = it.scratch / "wire"
    directory.mkdir(exist_ok=True)
    async with Wire(it.redis_url, directory) as wire:
        wired = WorkerProcess(
            "wired", wire.url, it.workers[0].model_dir, it.scratch / "wired.log", dict(it.workers[0].flags)
        )
        wired.start()
        try:
            await wait_for_workers(it.broker, {wired.worker_id})
            for worker in it.workers:
                worker.send(signal.SIGSTOP)

            async def cut(_request_id: str) -> None:
                wire.cut()
                for worker in it.workers:
                    worker.send(signal.SIGCONT)
                await asyncio.sleep(2 * LEASE_MS / 1000)
                wire.mend()

            it.judge("worker-cut", await it.streams(STREAMS, on_token=at_token(it.tokens // 4, cut)))
        finally:
            for worker in it.workers:
                worker.send(signal.SIGCONT)
            wired.kill()


async def gateway_killed(it: Field) -> None:
    await it.have_workers(1)

    async def kill(_request_id: str) -> None:
        it.gateways[0].kill()

    it.judge("gateway-killed", await it.streams(STREAMS, on_token=at_token(it.tokens // 4, kill)))
    it.gateways[0].start()
    await it.gateways[0].ready()


async def valkey_killed(it: Field) -> None:
    await it.have_workers(1)

    async def restart(_request_id: str) -> None:
        it.valkey.kill()
        it.valkey.wait()
        it.valkey = await asyncio.to_thread(embedded.start, it.valkey_server)

    it.judge("valkey-killed", await it.streams(STREAMS, on_token=at_token(it.tokens // 4, restart)))


async def valkey_full(it: Field) -> None:
    await it.have_workers(1)

    async def fill(_request_id: str) -> None:
        async with Redis.from_url(it.redis_url, protocol=2) as client:
            await client.config_set("maxmemory", 1)
            await asyncio.sleep(3)
            await client.config_set("maxmemory", 0)

    it.judge("valkey-full", await it.streams(STREAMS, on_token=at_token(it.tokens // 4, fill)))


async def postgres_down(it: Field, outage_s: float) -> None:
    await it.have_workers(1)
    it.judge("postgres-down", await it.streams(STREAMS))  # the key is known to both gateways
    it.judge("postgres-down", await it.streams(STREAMS, first=1))
    it.postgres.send_signal(it.postgres_server.command.stop_signal)
    it.postgres.wait()
    ends_at = time.monotonic() + outage_s
    while time.monotonic() < ends_at:
        it.judge("postgres-down", await it.streams(STREAMS))
    it.postgres = await asyncio.to_thread(embedded.start, it.postgres_server)


async def drain_for_ever() -> None:
    """The ledger's task, as Celery runs it: again and again, whatever becomes of each time."""
    from django.db import connections

    from inference.services.usage import drain_usage_stream

    def once() -> None:
        try:
            drain_usage_stream(budget_s=5)
        finally:
            connections.close_all()

    while True:
        with contextlib.suppress(Exception):  # the database or the queue is away: that is the point
            await asyncio.to_thread(once)
        await asyncio.sleep(1)


async def ledger(it: Field) -> tuple[int, int]:
    """Rows missing and surplus, tokens included: a row with wrong counts is missing."""
    from django.db import connections

    from inference.models import UsageRecord

    def rows() -> list[tuple[str, int, int]]:
        try:
            return list(UsageRecord.unscoped.values_list("request_id", "prompt_tokens", "completion_tokens"))
        finally:
            connections.close_all()

    wanted = Counter((a.request_id, len(a.ask.prompt), len(a.tokens)) for a in it.answers)
    deadline = time.monotonic() + 60
    while True:
        found = Counter(await asyncio.to_thread(rows))
        missing, surplus = (wanted - found).total(), (found - wanted).total()
        if not missing or time.monotonic() > deadline:
            return missing, surplus
        await asyncio.sleep(1)


async def run(it: Field, rounds: int, outage_s: float) -> dict[str, object]:
    for gateway in it.gateways:
        gateway.start()
    it.workers[0].start()
    drain = asyncio.create_task(drain_for_ever(), name="drain")
    try:
        for gateway in it.gateways:
            await gateway.ready()
        await it.have_workers(1)  # it leaves its compiled kernels for the others
        for worker in it.workers[1:]:
            worker.start()
        await it.have_workers(WORKERS)
        asks = [
            Ask(
                tuple(rng.randrange(256) for _ in range(rng.randrange(4, 40))), seed=number % 2 * (number + 1)
            )
            for number in range(8)
        ]
        for answer in await asyncio.gather(*map(it.ask, asks)):
            assert len(answer.tokens) == it.tokens, answer.error
            it.expected[answer.ask] = answer
        print("  undisturbed answers are known", flush=True)
        for number in range(rounds):
            await worker_killed(it)
            if number % 10 == 9:
                print(f"  round {number + 1}: {dict(it.by_fault['worker-killed'])}", flush=True)
        await it.have_workers(WORKERS)
        for fault in (worker_paused, worker_cut, gateway_killed, valkey_killed, valkey_full):
            print(f"  {fault.__name__}", flush=True)
            await fault(it)
        print("  postgres_down", flush=True)
        await postgres_down(it, outage_s)
        missing, surplus = await ledger(it)
    finally:
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)
        for process in (*it.workers, *it.gateways):
            process.kill()
        await it.broker.aclose()
    for fault_name, counts in it.by_fault.items():
        print(f"{fault_name:15} {dict(counts)}")
    return {
        "rounds": rounds,
        **{verdict: it.counts[verdict] for verdict in ("lost", "doubled", "changed")},
        "ledger_missing": missing,
        "ledger_surplus": surplus,
        "streams": len(it.answers),
        "kills": it.by_fault["worker-killed"]["kills"] if rounds else 0,
    }


def set_up_django(env: dict[str, str]) -> str:
    """Migrates, and makes a tenant with a key: its secret."""
    os.environ.update(env)
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity=0"],
        cwd=ROOT,
        env={**os.environ, **env},
        check=True,
    )
    import django

    django.setup()
    from tenants.models import Tier
    from tenants.services import Actor, create_tenant, issue_api_key

    actor = Actor.system("bench")
    tenant = create_tenant(actor=actor, name="Bench", tier=Tier.objects.get(name="standard"))
    return issue_api_key(actor=actor, tenant=tenant, name="bench").secret


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds without PostgreSQL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-faults-") as directory:
        scratch = Path(directory)
        scratch.chmod(0o755)
        postgres_server = embedded.prepare_postgres(scratch, durable=True)
        valkey_server = embedded.prepare_valkey(scratch, durable=True)
        postgres, valkey = embedded.start(postgres_server), embedded.start(valkey_server)
        env = {
            "DATABASE_URL": postgres_server.url,
            "REDIS_URL": valkey_server.url,
            "WEIR_VAR_DIR": str(scratch),
            "DJANGO_SETTINGS_MODULE": "weir.settings",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        }
        it = None
        try:
            secret = set_up_django(env)
            model_dir = tiny_model(scratch)
            flags: dict[str, object] = {"lease_ms": LEASE_MS, "max_num_seqs": 8, "max_model_len": 1024}
            gateways = [
                Gateway({**os.environ, **env}, free_port(), scratch / f"gateway-{n}.log") for n in range(2)
            ]
            workers = [
                WorkerProcess(f"w{n}", valkey_server.url, model_dir, scratch / f"worker-{n}.log", flags)
                for n in range(WORKERS)
            ]
            broker = GatewayBroker(valkey_server.url, timeout_s=30)
            it = Field(
                valkey_server.url, scratch, gateways, workers, broker, secret, arguments.tokens,
                valkey, valkey_server, postgres, postgres_server,
            )  # fmt: skip
            print(f"{processor()}; {WORKERS} workers, 2 gateways, lease {LEASE_MS} ms", flush=True)
            results = asyncio.run(run(it, arguments.rounds, arguments.outage))
        finally:
            for process, server in (
                (it.valkey if it else valkey, valkey_server),
                (it.postgres if it else postgres, postgres_server),
            ):
                process.send_signal(server.command.stop_signal)
                process.wait()
    print(json.dumps(results))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
