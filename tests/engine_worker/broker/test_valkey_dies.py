"""The server itself dies. What is promised:

    with `appendfsync always`     nothing that it answered is lost
    with `everysec` (embedded)    its last seconds may be, always whole calls and always the last ones

A script is one transaction of the log, so what is left is what some earlier moment was: never half a call.
From there requests go on: a worker that knows more than the log is fenced, and the tokens are made again.
The state machine beside this kills the server between any two steps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine_worker.broker import (
    Claim,
    GatewayBroker,
    Held,
    OperatorBroker,
    UnknownRequest,
    Verdict,
    WorkerBroker,
)
from engine_worker.protocol import GenerateRequest
from tests.engine_worker.broker.driving import (
    end_backoffs,
    lapse_leases,
    last,
    publish,
    put,
    tokens,
    usage_events,
)
from tests.engine_worker.broker.durable import DurableValkey, contents


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[DurableValkey]:
    server = DurableValkey(tmp_path / "first")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(valkey: DurableValkey) -> str:
    return valkey.url


@pytest.fixture
def patient(make: Callable[..., GenerateRequest]) -> Callable[..., GenerateRequest]:
    """A request whose deadline no start of a server on a busy machine outlasts."""
    return partial(make, created_at_ms=0, deadline_ms=3_600_000)


@pytest.fixture
async def operator(redis_url: str) -> AsyncIterator[OperatorBroker]:
    broker = OperatorBroker(redis_url, timeout_s=30)
    yield broker
    await broker.aclose()


async def test_the_log_holds_each_call_whole_or_not_at_all(
    valkey, redis_url, model, gateway, worker, operator, patient, tmp_path
):
    """Every script, cut in the middle of what it writes: the server comes back as it was before that call."""
    gateway._sweep = lambda model: None  # it would act between the steps
    prefix = f"weir:{{m:{model}}}:"
    claims: dict[str, Claim] = {}

    async def claim() -> None:
        (found,) = await worker.claim(1)
        claims[found.request.request_id] = found

    async def finish(name: str, reason: str = "stop", seq: int = 0) -> None:
        await publish(worker, claims[name], last(claims[name], seq, seq, seq + 1, reason=reason))

    async def lose() -> None:
        await lapse_leases(redis_url, model)
        await worker.expire()

    def release(name: str, *, failed: bool) -> Awaitable[None]:
        return worker.release([Held(name, claims[name].epoch)], failed=failed, code="c", message="m")

    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: put(gateway, patient("r1", tenant_id="a")),
        lambda: put(gateway, patient("r3", tenant_id="c", tier_rank=2)),
        lambda: gateway.attach(model, "r1", "weir:live:other"),
        claim,
        lambda: publish(worker, claims["r1"], tokens(claims["r1"], 0, 1, 2), tokens(claims["r1"], 2, 3)),
        lambda: release("r1", failed=False),
        claim,
        lambda: finish("r1", seq=3),
        lambda: put(gateway, patient("r2", tenant_id="b"), weight=3),
        claim,
        lambda: gateway.cancel(model, "r2"),
        lambda: finish("r2", "cancelled"),
        lambda: gateway.cancel(model, "r3"),
        lambda: put(gateway, patient("r4"), max_attempts=2),
        claim,
        lambda: release("r4", failed=True),
        lambda: end_backoffs(redis_url, model),
        claim,
        lose,
        lambda: operator.requeue(model, "r4"),
        claim,
        lambda: release("r4", failed=True),
        lambda: end_backoffs(redis_url, model),
        claim,
        lose,
        lambda: operator.drop(model, "r4"),
    ]
    before, size = await contents(redis_url, prefix), valkey.log_size()
    for number, step in enumerate(steps):
        await step()
        at = valkey.end_of_last_call(size)
        after = await contents(redis_url, prefix)
        if step is lose:  # two calls: the first is the test's own
            before, size = after, valkey.log_size()
            continue
        assert after != before, f"step {number} changes nothing"
        cut = valkey.cut_to(at, tmp_path / str(number))
        cut.start()
        try:
            assert await contents(cut.url, prefix) == before, f"step {number}"
        finally:
            cut.kill()
        before, size = after, valkey.log_size()
    assert {name for name, (_, lapses) in before.items() if name.startswith("req:") and lapses} == {
        f"req:r{n}" for n in range(1, 5)
    }


async def test_whatever_tail_of_its_log_is_lost_a_request_goes_on_and_ends_once(
    valkey, redis_url, model, gateway, worker, patient, tmp_path
):
    sizes = [valkey.log_size()]
    await put(gateway, patient("r1"))
    sizes.append(valkey.log_size())
    (claim,) = await worker.claim(1)
    sizes.append(valkey.log_size())
    for seq in (0, 2):
        await publish(worker, claim, tokens(claim, seq, seq, seq + 1))
        sizes.append(valkey.log_size())
    await publish(worker, claim, last(claim, 4, 4, 5))
    sizes.append(valkey.log_size())
    for number, size in enumerate(sizes):
        cut = valkey.cut_to(size, tmp_path / str(number))
        cut.start()
        try:
            await goes_on(cut.url, model, claim, is_lost=number == 0, is_over=number == len(sizes) - 1)
        finally:
            cut.kill()


async def goes_on(url: str, model: str, claim: Claim, *, is_lost: bool, is_over: bool) -> None:
    gateway = GatewayBroker(url, timeout_s=30)
    old, new = (WorkerBroker(url, model=model, worker_id=name, timeout_s=30) for name in ("w1", "w2"))
    try:
        # The worker made it all, and doesn't know whether its last call got through.
        verdict = await publish(old, claim, last(claim, 4, 4, 5))
        if is_lost:
            assert verdict is Verdict.FENCED
            with pytest.raises(UnknownRequest):
                await gateway.request_state(model, "r1")
            return
        if (await gateway.request_state(model, "r1")).state != "finished":
            assert verdict is Verdict.FENCED
            await old.expire()
            await end_backoffs(url, model)
            (again,) = await new.claim(1)
            made = len(again.logged_token_ids)
            assert list(again.logged_token_ids) == list(range(made))
            await publish(new, again, last(again, made, *range(made, 6)))
            assert await publish(old, claim, last(claim, 4, 4, 5)) is Verdict.FENCED
        else:
            assert verdict is Verdict.OK
        log = await gateway.read_log(model, "r1")
        assert [token for chunk in log for token in chunk.token_ids] == list(range(6))
        assert [chunk.finish is not None for chunk in log].count(True) == 1
        (event,) = await usage_events(url, model)
        assert (event.prompt_tokens, event.completion_tokens) == (3, 6)
        assert not is_over or event.attempts == 1
    finally:
        for broker in (gateway, old, new):
            await broker.aclose()
