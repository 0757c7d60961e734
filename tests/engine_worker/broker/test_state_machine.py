"""The request's state machine, searched by hypothesis against the real server.

Any order of enqueue, claim, hand-over, publish, finish, cancel, lapse, back-off, hand-back, sweep, death, and
an operator's requeue and drop, by workers that may be slow, repeat themselves or have lost what
they hold: between any two steps a worker may as well have died; and in a second run the server
does. After each step the server agrees with a plain model of what should be, and:

    every life that is over has exactly one usage event, its last chunk is the log's last, no other has any
    the usage events of a request add up to its tokens
    no token is lost or doubled: the log is the output, in order, without a hole
    the queue goes by rank, then by the virtual token counters, then by arrival
    where nothing of a tenant runs, its counter is what it was served, though output is charged ahead
    nothing that is over is left in the queue, the leases or the deadlines

One class, and so one module: hypothesis takes the rules, what they share and what is checked after each from one.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from redis.asyncio import Redis

from engine_worker.broker import Claim, GatewayBroker, Held, OperatorBroker, Verdict, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from tests.engine_worker.broker.driving import end_backoffs, lapse_leases, last, tokens, usage_events
from tests.engine_worker.broker.durable import DurableValkey
from tests.engine_worker.broker.expected import WEIGHTS, Counters, Expected, cost

pytestmark = pytest.mark.timeout(600)

MAX_ATTEMPTS = 2
PROMPT = 2


class Requests(RuleBasedStateMachine):
    requests = Bundle("requests")
    claims = Bundle("claims")
    """Also those that were lost since: a slow worker goes on using them."""
    can_offer = True

    @initialize()
    def connect(self) -> None:
        self.runner = asyncio.Runner()
        self.url = self.server_url()
        self.model = f"machine-{uuid.uuid4().hex}"
        self.expected: dict[str, Expected] = {}
        self.counters = {rank: Counters() for rank in range(3)}
        self.gateway = GatewayBroker(self.url, timeout_s=10)
        # The gateway's own sweep would act between the steps.
        self.gateway._sweep = lambda model: None  # type: ignore[method-assign]
        self.operator = OperatorBroker(self.url, timeout_s=10)
        # Its leases end when a rule says so, however slow the machine is.
        self.worker = WorkerBroker(
            self.url, model=self.model, worker_id="w", lease_ms=3_600_000, timeout_s=10
        )
        self.handed = self.worker.handed()
        self.runner.run(self.handed.__aenter__())
        self.has_offered = False
        self.on_the_way: list[str] = []

    def server_url(self) -> str:
        return os.environ["REDIS_URL"]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self._disconnect())
            self.runner.close()

    async def _disconnect(self) -> None:
        await self.gateway.aclose()
        await self.handed.__aexit__(None, None, None)
        await self.worker.aclose()
        await self.operator.aclose()
        async with Redis.from_url(self.url, protocol=2) as client:
            async for key in client.scan_iter(match=f"weir:[{{]m:{self.model}[}}]:*"):
                await client.unlink(key)

    # -- what can happen

    @rule(
        target=requests,
        rank=st.integers(0, 2),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        max_output=st.integers(1, 6),
    )
    def enqueue(self, rank: int, tenant: str, max_output: int) -> str:
        request_id = f"r{len(self.expected)}"
        request = GenerateRequest(
            request_id=request_id,
            model=self.model,
            tenant_id=tenant,
            tier=f"tier-{rank}",
            tier_rank=rank,
            prompt_token_ids=[1] * PROMPT,
            sampling=SamplingParams(max_tokens=max_output),
            created_at_ms=0,
            deadline_ms=3_600_000,
            reply_channel=f"weir:live:{self.model}",
        )
        bounds = {"max_queued": 1000, "max_queued_per_tenant": 1000}
        queued = self.runner.run(
            self.gateway.enqueue(request, **bounds, weight=WEIGHTS[tenant], max_attempts=MAX_ATTEMPTS)
        )
        self._join(rank, tenant)
        is_handed = self.has_offered and not any(e.state == "queued" for e in self.expected.values())
        self.expected[request_id] = expected = Expected(
            rank=rank, arrival=len(self.expected), tenant=tenant, max_output=max_output
        )
        if is_handed:
            self.has_offered = False
            expected.counter = self._claimed(expected)
            self.on_the_way.append(request_id)
            assert queued.position == 0
        else:
            assert 0 <= queued.position < len(self._queue())
        return request_id

    @rule(target=claims, offers=st.booleans())
    def claim(self, offers: bool) -> Claim | None:
        head = self._head()
        claims = self.runner.run(self.worker.claim(1, offers=offers and self.can_offer))
        self.has_offered = offers and self.can_offer and not claims
        if head is None:
            assert claims == []
            return None
        (claim,) = claims
        assert claim.request.request_id == head
        expected = self.expected[head]
        assert claim.counter == self._claimed(expected)
        assert claim.tier_class == expected.rank
        assert (claim.epoch, claim.attempt) == (expected.epoch, expected.attempts)
        assert list(claim.logged_token_ids) == expected.output
        return claim

    @rule(target=claims)
    def take(self) -> Claim | None:
        """What was handed over, however much later: it may be another's by now, or over."""
        if not self.on_the_way:
            return None
        claim = self.runner.run(anext(self.handed))
        assert isinstance(claim, Claim)
        expected = self.expected[self.on_the_way.pop(0)]
        assert self.expected[claim.request.request_id] is expected
        assert (claim.tier_class, claim.counter) == (expected.rank, expected.counter)
        assert (claim.epoch, claim.attempt, claim.logged_token_ids) == (1, 1, ())
        return claim

    @rule(claim=claims, count=st.integers(0, 3), repeat=st.booleans())
    def publish(self, claim: Claim | None, count: int, repeat: bool) -> None:
        if claim is None:
            return
        expected = self.expected[claim.request.request_id]
        seq = len(expected.output)
        made = list(range(seq, seq + count))
        chunks = [tokens(claim, seq, *made)] if made else []
        verdict = self._publish(claim, *chunks)
        if self._owns(claim):
            self._made(expected, made)
        self._check(claim, verdict)
        if repeat and self._owns(claim):
            self._check(claim, self._publish(claim, *chunks))

    @rule(claim=claims, count=st.integers(0, 2), repeat=st.booleans())
    def finish(self, claim: Claim | None, count: int, repeat: bool) -> None:
        if claim is None:
            return
        expected = self.expected[claim.request.request_id]
        seq = len(expected.output)
        made = list(range(seq, seq + count))
        reason = "cancelled" if expected.is_cancelled else "stop"
        chunk = last(claim, seq, *made, reason=reason)
        verdict = self._publish(claim, chunk)
        if self._owns(claim):
            assert verdict is not Verdict.FENCED
            self._made(expected, made)
            self._over(expected, reason)
            if repeat:
                assert self._publish(claim, chunk) is not Verdict.FENCED

    @rule(request_id=requests)
    def cancel(self, request_id: str) -> None:
        self.runner.run(self.gateway.cancel(self.model, request_id))
        expected = self.expected[request_id]
        if expected.state == "queued":
            self._over(expected, "cancelled")
        elif expected.state == "running":
            expected.is_cancelled = True

    @rule(request_id=requests)
    def refuse(self, request_id: str) -> None:
        self.runner.run(self.gateway.refuse(self.model, request_id, code="model_unavailable", message="m"))
        expected = self.expected[request_id]
        if expected.state == "queued":
            self._over(expected, "error")

    @rule()
    def lapse_and_sweep(self) -> None:
        self.runner.run(lapse_leases(self.url, self.model))
        self.runner.run(self.worker.expire())
        self._hold_backoffs()
        for expected in self.expected.values():
            if expected.state == "running":
                self._given_back(expected, failed=True)

    @rule()
    def backoffs_end(self) -> None:
        self.runner.run(end_backoffs(self.url, self.model))
        self.runner.run(self.worker.expire())
        # All had the same score: Redis hands them out by their names.
        for _, expected in sorted(self.expected.items()):
            if expected.state == "queued" and expected.is_put_off:
                self._join(expected.rank, expected.tenant)
                expected.is_put_off = False

    @rule(request_id=requests)
    def requeue(self, request_id: str) -> None:
        expected = self.expected[request_id]
        done = self.runner.run(self.operator.requeue(self.model, request_id))
        assert done == (expected.state == "dead")
        if done:
            self._join(expected.rank, expected.tenant)
            expected.state, expected.end, expected.attempts = "queued", None, 0
            expected.lives += 1

    @rule(request_id=requests)
    def drop(self, request_id: str) -> None:
        expected = self.expected[request_id]
        assert self.runner.run(self.operator.drop(self.model, request_id)) == (expected.state == "dead")
        if expected.state == "dead":
            expected.state = "finished"

    @rule(claim=consumes(claims), failed=st.booleans())
    def release(self, claim: Claim | None, failed: bool) -> None:
        if claim is None:
            return
        held = [Held(claim.request.request_id, claim.epoch)]
        self.runner.run(self.worker.release(held, failed=failed, code="engine_failed", message="m"))
        self._hold_backoffs()
        if self._owns(claim):
            expected = self.expected[claim.request.request_id]
            expected.attempts -= 0 if failed else 1
            self._given_back(expected, failed=failed)

    # -- what must be true after each

    @invariant()
    def the_server_agrees(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.run(self._compare())

    @invariant()
    def counters_are_what_was_served(self) -> None:
        if not hasattr(self, "runner"):
            return
        for rank, counters in self.counters.items():
            for tenant, counter in counters.served.items():
                of_tenant = [e for e in self.expected.values() if (e.rank, e.tenant) == (rank, tenant)]
                if any(e.state == "running" for e in of_tenant):
                    continue
                prompts = sum(cost(tenant, PROMPT) for e in of_tenant if e.epoch > 0)
                output = sum(cost(tenant, 2 * len(e.output)) for e in of_tenant)
                assert counter - counters.lifts[tenant] == prompts + output

    async def _compare(self) -> None:
        events = {}
        for event in await usage_events(self.url, self.model):
            assert event.request_id not in events, "a second usage event"
            events[event.request_id] = event
        assert sorted(events) == sorted(
            request_id if life == 0 else f"{request_id}~{life + 1}"
            for request_id, expected in self.expected.items()
            for life in range(len(expected.billed))
        )
        for request_id, expected in self.expected.items():
            state = await self.gateway.request_state(self.model, request_id)
            assert (state.state, state.attempts) == (expected.state, expected.attempts)
            log = await self.gateway.read_log(self.model, request_id)
            assert [token for chunk in log for token in chunk.token_ids] == expected.output
            assert sum(chunk.finish is not None for chunk in log) == (expected.end is not None)
            for life, (reason, prompt, count) in enumerate(expected.billed):
                event = events[request_id if life == 0 else f"{request_id}~{life + 1}"]
                assert (event.finish_reason, event.completion_tokens) == (reason, count)
                assert event.prompt_tokens == prompt
            if expected.end:
                assert event.attempts == expected.attempts
                assert log[-1].finish.reason == expected.end
                assert sum(count for *_, count in expected.billed) == len(expected.output)
        prefix = f"weir:{{m:{self.model}}}:"
        async with Redis.from_url(self.url, protocol=2) as client:
            leases = {member.decode() for member in await client.zrange(prefix + "leases", 0, -1)}
            deadlines = {member.decode() for member in await client.zrange(prefix + "deadlines", 0, -1)}
            tiers = {int(rank) for rank in await client.zrange(prefix + "tiers", 0, -1)}
            delayed = {member.decode() for member in await client.zrange(prefix + "delayed", 0, -1)}
            dead = {member.decode() for member in await client.zrange(prefix + "dead", 0, -1)}
            for rank, counters in self.counters.items():
                served = await client.zrange(f"{prefix}served:{rank}", 0, -1, withscores=True)
                assert {tenant.decode(): int(score) for tenant, score in served} == counters.served
        assert leases == {key for key, expected in self.expected.items() if expected.state == "running"}
        put_off = {key for key, expected in self.expected.items() if expected.is_put_off}
        assert delayed == put_off
        assert deadlines == put_off | set(self._queue())
        assert dead == {key for key, expected in self.expected.items() if expected.state == "dead"}
        assert tiers == {self.expected[request_id].rank for request_id in self._queue()}

    # -- the model

    def _hold_backoffs(self) -> None:
        """Only a claim or a sweep looks at them, and both are steps of ours: no back-off ends by itself."""
        self.runner.run(end_backoffs(self.url, self.model, at_ms=2**45))

    def _queue(self) -> list[str]:
        return [key for key, e in self.expected.items() if e.state == "queued" and not e.is_put_off]

    def _waiting(self, rank: int) -> set[str]:
        """Tenants that have something in that tier's queue."""
        return {self.expected[key].tenant for key in self._queue() if self.expected[key].rank == rank}

    def _head(self) -> str | None:
        """Whose turn it is."""
        queued = [
            (e.rank, self.counters[e.rank].served[e.tenant], e.tenant, e.arrival, key)
            for key, e in ((key, self.expected[key]) for key in self._queue())
        ]
        return min(queued)[-1] if queued else None

    def _claimed(self, expected: Expected) -> int:
        """It runs from now on. Returns its tenant's counter when its turn came."""
        counters = self.counters[expected.rank]
        counters.level = counter = counters.served[expected.tenant]
        if expected.epoch == 0:
            counters.served[expected.tenant] += cost(expected.tenant, PROMPT)
        counters.charge_output(expected, max(len(expected.output), counters.expected_output(expected)))
        expected.state = "running"
        expected.epoch += 1
        expected.attempts += 1
        return counter

    def _join(self, rank: int, tenant: str) -> None:
        self.counters[rank].join(tenant, self._waiting(rank))

    def _made(self, expected: Expected, made: list[int]) -> None:
        expected.output += made
        if len(expected.output) > expected.charged:
            self.counters[expected.rank].charge_output(expected, len(expected.output))

    def _over(self, expected: Expected, reason: str, state: str = "finished") -> None:
        expected.state, expected.end, expected.is_put_off = state, reason, False
        self.counters[expected.rank].charge_output(expected, len(expected.output))
        if expected.epoch > 0:
            self.counters[expected.rank].learn(expected)
        before = sum(count for *_, count in expected.billed)
        is_computed = expected.epoch > 0 and not expected.billed  # in a later life it is billed already
        expected.billed.append((reason, PROMPT if is_computed else 0, len(expected.output) - before))

    def _owns(self, claim: Claim) -> bool:
        expected = self.expected[claim.request.request_id]
        return expected.state == "running" and expected.epoch == claim.epoch

    def _given_back(self, expected: Expected, *, failed: bool) -> None:
        if expected.is_cancelled:
            self._over(expected, "cancelled")
        elif expected.attempts >= MAX_ATTEMPTS:
            self._over(expected, "error", state="dead")
        elif failed:
            self.counters[expected.rank].charge_output(expected, len(expected.output))
            expected.state, expected.is_put_off = "queued", True
        else:
            self.counters[expected.rank].charge_output(expected, len(expected.output))
            self._join(expected.rank, expected.tenant)
            expected.state = "queued"

    def _publish(self, claim: Claim, *chunks) -> Verdict:  # type: ignore[no-untyped-def]
        (verdict,) = self.runner.run(
            self.worker.publish([Held(claim.request.request_id, claim.epoch, chunks)])
        )
        return verdict

    def _check(self, claim: Claim, verdict: Verdict) -> None:
        if not self._owns(claim):
            assert verdict is Verdict.FENCED
        elif self.expected[claim.request.request_id].is_cancelled:
            assert verdict is Verdict.CANCELLED
        else:
            assert verdict is Verdict.OK


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class RequestsOfADyingServer(Requests):
    """The same on a server that is killed between steps, and keeps what it answered."""

    server: DurableValkey
    can_offer = False  # when its worker hears it again is another matter

    def server_url(self) -> str:
        return self.server.url

    @rule()
    def server_dies(self) -> None:
        self.server.kill()
        self.server.start()


TestRequestsOfADyingServer = pytest.mark.usefixtures("dying_server")(RequestsOfADyingServer.TestCase)
TestRequestsOfADyingServer.settings = settings(
    max_examples=5, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module", autouse=True)
def lasting_offers() -> Iterator[None]:
    """However much time lies between two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_worker.broker.worker.OFFER_MS", 3_600_000)
        yield


@pytest.fixture(scope="module")
def dying_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    RequestsOfADyingServer.server = DurableValkey(tmp_path_factory.mktemp("dying"))
    RequestsOfADyingServer.server.start()
    yield
    RequestsOfADyingServer.server.kill()
