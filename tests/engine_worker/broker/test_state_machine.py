"""The request's state machine, searched by hypothesis against the real server.

Any order of enqueue, claim, publish, finish, cancel, lapse, hand-back and sweep, by workers that may
be slow, repeat themselves or have lost what they hold. After each step the server agrees with a
plain model of what should be, and:

    every request that is over has exactly one usage event and one last chunk, no other has any
    no token is lost or doubled: the log is the output, in order, without a hole
    the queue goes by rank, then by arrival
    nothing that is over is left in the queue, the leases or the deadlines
"""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from redis.asyncio import Redis

from engine_worker.broker import Claim, GatewayBroker, Held, Verdict, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from tests.engine_worker.broker.driving import lapse_leases, last, tokens, usage_events

pytestmark = pytest.mark.timeout(600)

MAX_ATTEMPTS = 3


@dataclass
class Expected:
    """What should be true of one request."""

    rank: int
    arrival: int
    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    output: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    end: str | None = None


class Requests(RuleBasedStateMachine):
    requests = Bundle("requests")
    claims = Bundle("claims")
    """Also those that were lost since: a slow worker goes on using them."""

    @initialize()
    def connect(self) -> None:
        self.runner = asyncio.Runner()
        self.url = os.environ["REDIS_URL"]
        self.model = f"machine-{uuid.uuid4().hex}"
        self.expected: dict[str, Expected] = {}
        self.gateway = GatewayBroker(self.url, timeout_s=10)
        # The gateway's own sweep would act between the steps.
        self.gateway._sweep = lambda model: None  # type: ignore[method-assign]
        self.worker = WorkerBroker(self.url, model=self.model, worker_id="w", timeout_s=10)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self._disconnect())
            self.runner.close()

    async def _disconnect(self) -> None:
        await self.gateway.aclose()
        await self.worker.aclose()
        async with Redis.from_url(self.url, protocol=2) as client:
            async for key in client.scan_iter(match=f"weir:[{{]m:{self.model}[}}]:*"):
                await client.unlink(key)

    # -- what can happen

    @rule(target=requests, rank=st.integers(0, 2), tenant=st.sampled_from(["t1", "t2"]))
    def enqueue(self, rank: int, tenant: str) -> str:
        request_id = f"r{len(self.expected)}"
        request = GenerateRequest(
            request_id=request_id,
            model=self.model,
            tenant_id=tenant,
            tier=f"tier-{rank}",
            tier_rank=rank,
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(max_tokens=100),
            created_at_ms=0,
            deadline_ms=3_600_000,
            reply_channel=f"weir:live:{self.model}",
        )
        bounds = {"max_queued": 1000, "max_queued_per_tenant": 1000}
        queued = self.runner.run(self.gateway.enqueue(request, **bounds, max_attempts=MAX_ATTEMPTS))
        self.expected[request_id] = Expected(rank=rank, arrival=len(self.expected))
        assert queued.position == self._queue().index(request_id)
        return request_id

    @rule(target=claims)
    def claim(self) -> Claim | None:
        queue = self._queue()
        claims = self.runner.run(self.worker.claim(1))
        if not queue:
            assert claims == []
            return None
        (claim,) = claims
        assert claim.request.request_id == queue[0]
        expected = self.expected[queue[0]]
        expected.state = "running"
        expected.epoch += 1
        expected.attempts += 1
        assert (claim.epoch, claim.attempt) == (expected.epoch, expected.attempts)
        assert list(claim.logged_token_ids) == expected.output
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
            expected.output += made
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
            expected.output += made
            expected.state, expected.end = "finished", reason
            if repeat:
                assert self._publish(claim, chunk) is not Verdict.FENCED

    @rule(request_id=requests)
    def cancel(self, request_id: str) -> None:
        self.runner.run(self.gateway.cancel(self.model, request_id))
        expected = self.expected[request_id]
        if expected.state == "queued":
            expected.state, expected.end = "finished", "cancelled"
        elif expected.state == "running":
            expected.is_cancelled = True

    @rule()
    def lapse_and_sweep(self) -> None:
        self.runner.run(lapse_leases(self.url, self.model))
        self.runner.run(self.worker.expire())
        for expected in self.expected.values():
            if expected.state == "running":
                self._given_back(expected)

    @rule(claim=consumes(claims), failed=st.booleans())
    def release(self, claim: Claim | None, failed: bool) -> None:
        if claim is None:
            return
        held = [Held(claim.request.request_id, claim.epoch)]
        self.runner.run(self.worker.release(held, failed=failed, code="engine_failed", message="m"))
        if self._owns(claim):
            expected = self.expected[claim.request.request_id]
            expected.attempts -= 0 if failed else 1
            self._given_back(expected)

    # -- what must be true after each

    @invariant()
    def the_server_agrees(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.run(self._compare())

    async def _compare(self) -> None:
        events = {}
        for event in await usage_events(self.url, self.model):
            assert event.request_id not in events, "a second usage event"
            events[event.request_id] = event
        over = {request_id for request_id, expected in self.expected.items() if expected.end}
        assert set(events) == over
        for request_id, expected in self.expected.items():
            state = await self.gateway.request_state(self.model, request_id)
            assert (state.state, state.attempts) == (expected.state, expected.attempts)
            log = await self.gateway.read_log(self.model, request_id)
            assert [token for chunk in log for token in chunk.token_ids] == expected.output
            assert sum(chunk.finish is not None for chunk in log) == (expected.end is not None)
            if expected.end:
                event = events[request_id]
                assert (event.finish_reason, event.completion_tokens) == (expected.end, len(expected.output))
                assert event.attempts == expected.attempts
                assert log[-1].finish.reason == expected.end
        prefix = f"weir:{{m:{self.model}}}:"
        async with Redis.from_url(self.url, protocol=2) as client:
            leases = {member.decode() for member in await client.zrange(prefix + "leases", 0, -1)}
            deadlines = {member.decode() for member in await client.zrange(prefix + "deadlines", 0, -1)}
            tiers = {int(rank) for rank in await client.zrange(prefix + "tiers", 0, -1)}
        assert leases == {key for key, expected in self.expected.items() if expected.state == "running"}
        assert deadlines == set(self._queue())
        assert tiers == {self.expected[request_id].rank for request_id in self._queue()}

    # -- the model

    def _queue(self) -> list[str]:
        queued = [(e.rank, e.arrival, key) for key, e in self.expected.items() if e.state == "queued"]
        return [key for _, _, key in sorted(queued)]

    def _owns(self, claim: Claim) -> bool:
        expected = self.expected[claim.request.request_id]
        return expected.state == "running" and expected.epoch == claim.epoch

    def _given_back(self, expected: Expected) -> None:
        if expected.is_cancelled:
            expected.state, expected.end = "finished", "cancelled"
        elif expected.attempts >= MAX_ATTEMPTS:
            expected.state, expected.end = "finished", "error"
        else:
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
