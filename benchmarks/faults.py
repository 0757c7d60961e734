"""What is lost when things die: tokens, and rows in the ledger.

    make bench-faults                          # 100 rounds and six more faults, about 20 minutes on two cores
    make bench-faults ARGS="--rounds 3 --outage 5"

Real PostgreSQL, real Valkey with its log on, two real gateways, four real workers with the real engine
and a tiny random model; clients stream over HTTP and come back with Last-Event-ID when a connection
breaks. Half of the streams are greedy, half sample with a seed. Each is compared, by its text at the
client and by its token ids in the log, with what the same request gave before anything was disturbed: on
the compiled kernels, whose logits don't depend on what else is in a batch (torch's do, and a close call
may then go the other way).

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
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from redis.asyncio import Redis

from benchmarks.engine.measure import processor
from benchmarks.fault_field import Ask, Field, Gateway, at_token, free_port, rng
from benchmarks.fleet import ROOT, WorkerProcess, tiny_model, wait_for_workers
from engine_worker.broker import GatewayBroker
from tests.engine_worker.broker.wire import Wire
from weir import embedded

LEASE_MS = 3000
"""Longer than a busy machine keeps a worker from its turn: three lapses are the end of a request, and no fault."""
WORKERS = 4
STREAMS = 4


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


if __name__ == "__main__":
    main()
