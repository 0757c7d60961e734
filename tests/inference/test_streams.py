"""The fan-in against the real broker: order, gaps, slow readers, resumption."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import pytest
from django.conf import settings

from engine_worker.broker import GatewayBroker, Held, WorkerBroker
from engine_worker.protocol import Chunk, Finish, GenerateRequest, SamplingParams
from inference import streams
from inference.streams import LiveStreams, StreamLost, TokenStream


@pytest.fixture
def model() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def broker() -> AsyncIterator[GatewayBroker]:
    broker = GatewayBroker(settings.REDIS_URL, timeout_s=10)
    yield broker
    await broker.aclose()


@pytest.fixture
async def worker(model: str) -> AsyncIterator[WorkerBroker]:
    worker = WorkerBroker(settings.REDIS_URL, model=model, worker_id="w", timeout_s=10)
    yield worker
    await worker.aclose()


@pytest.fixture
async def live(broker: GatewayBroker) -> AsyncIterator[LiveStreams]:
    live = LiveStreams(broker, uuid.uuid4().hex)
    yield live
    await live.aclose()


def a_request(model: str, channel: str, request_id: str = "r1") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=model,
        tenant_id="t",
        tier="standard",
        tier_rank=1,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=10_000),
        created_at_ms=0,
        deadline_ms=600_000,
        reply_channel=channel,
    )


class Running:
    """A claimed request, and a hand that publishes its tokens."""

    def __init__(self, worker: WorkerBroker, request_id: str, epoch: int) -> None:
        self._worker, self._id, self._epoch, self._seq = worker, request_id, epoch, 0

    async def publish(self, *texts: str, finish: str | None = None) -> None:
        await self._worker.publish([self.held(*texts, finish=finish)])

    def held(self, *texts: str, finish: str | None = None, queued_ms: int | None = None) -> Held:
        chunks = []
        for text in texts:
            chunks.append(
                Chunk(
                    request_id=self._id,
                    epoch=self._epoch,
                    seq=self._seq,
                    token_ids=[7],
                    text=text,
                    queued_ms=queued_ms,
                )
            )
            self._seq += 1
        if finish:
            end = Finish(reason=finish, prompt_tokens=2, completion_tokens=self._seq)
            chunks.append(Chunk(request_id=self._id, epoch=self._epoch, seq=self._seq, finish=end))
        return Held(request_id=self._id, epoch=self._epoch, chunks=chunks)


@pytest.fixture
def begin(
    broker: GatewayBroker, worker: WorkerBroker, live: LiveStreams, model: str
) -> Callable[..., object]:
    async def start(request_id: str = "r1") -> tuple[TokenStream, Running]:
        stream = await live.open(model, request_id, is_new=True)
        await broker.enqueue(
            a_request(model, live.channel, request_id), max_queued=1000, max_queued_per_tenant=1000
        )
        (claim,) = await worker.claim(1)
        return stream, Running(worker, request_id, claim.epoch)

    return start


async def rest_of(stream: TokenStream) -> list[str]:
    texts = []
    while not stream.is_finished:
        chunk = await stream.next(10)
        assert chunk is not None, "nothing came for 10 s"
        if chunk.token_ids:
            texts.append(chunk.text)
    return texts


async def test_in_order_until_the_end(begin):
    stream, running = await begin()
    await running.publish("a", "b")
    await running.publish("c", finish="stop")
    assert await rest_of(stream) == ["a", "b", "c"]
    with pytest.raises(StopAsyncIteration):
        await stream.next(1)


async def test_silence_is_not_an_end(begin):
    stream, running = await begin()
    assert await stream.next(0.05) is None
    await running.publish("a", finish="stop")
    assert await rest_of(stream) == ["a"]


async def test_two_streams_of_one_channel(begin):
    first, one = await begin("r1")
    second, two = await begin("r2")
    await one.publish("a")
    await two.publish("x", finish="stop")
    await one.publish("b", finish="stop")
    assert (await rest_of(first), await rest_of(second)) == (["a", "b"], ["x"])


@pytest.mark.parametrize("from_seq", [0, 1, 3, 5])
async def test_joining_late_reads_the_log(begin, broker, live, model, from_seq):
    stream, running = await begin()
    await running.publish("a", "b", "c")
    late = await live.open(model, "r1", from_seq=from_seq)
    await running.publish("d", "e", finish="stop")
    assert await rest_of(late) == list("abcde")[from_seq:]
    assert await rest_of(stream) == list("abcde")


async def test_lost_and_repeated_messages(begin):
    stream, running = await begin()
    await running.publish("a")
    assert (await stream.next(10)).text == "a"
    stream.put(Chunk(request_id="r1", epoch=1, seq=0, token_ids=[7], text="a"))  # repeated
    await running.publish("b", "c")
    stream.miss()  # whatever came live is lost
    await running.publish("d", finish="stop")
    assert await rest_of(stream) == ["b", "c", "d"]


async def test_a_gap_in_the_numbers_is_filled_from_the_log(begin, live):
    stream, running = await begin()
    live._streams.clear()  # deaf: as if pub/sub dropped it
    await running.publish("a", "b")
    live._streams["r1"] = {stream}
    await running.publish("c", finish="stop")
    assert await rest_of(stream) == ["a", "b", "c"]


@pytest.mark.parametrize(("queued_ms", "at_once"), [(None, 64), (5, 8)])
async def test_a_step_of_many_streams_is_told_in_parts(begin, worker, queued_ms, at_once):
    """While a large batch's tokens go out, the event loop turns: nobody waits for all of them. A first token, which
    makes more work, comes with fewer others."""
    begun = [await begin(f"r{number}") for number in range(200)]
    turn, turns = 0, list[int]()

    def turned() -> None:
        nonlocal turn, turning
        turn, turning = turn + 1, asyncio.get_running_loop().call_soon(turned)

    async def hear(stream: TokenStream) -> None:
        chunk = await stream.next(30)
        assert chunk is not None
        assert chunk.text == "a"
        turns.append(turn)

    hearing = [asyncio.create_task(hear(stream)) for stream, _ in begun]
    turning = asyncio.get_running_loop().call_soon(turned)
    await worker.publish([running.held("a", queued_ms=queued_ms) for _, running in begun])
    await asyncio.gather(*hearing)
    turning.cancel()
    assert max(turns.count(each) for each in turns) <= at_once


async def test_a_slow_reader_costs_a_bounded_buffer(begin, monkeypatch):
    monkeypatch.setattr(streams, "_BUFFER_CHUNKS", 4)
    stream, running = await begin()
    texts = [str(number) for number in range(50)]
    for text in texts:
        await running.publish(text)
    await running.publish(finish="length")
    assert (await stream.next(10)).text == "0"
    assert await rest_of(stream) == texts[1:]


async def test_a_message_lost_at_the_end_is_found_after_a_silence(begin, live, monkeypatch):
    monkeypatch.setattr(streams, "_SILENCE_S", 0.1)
    stream, running = await begin()
    live._streams.clear()
    await running.publish("a", finish="stop")
    assert await rest_of(stream) == ["a"]


async def test_what_is_gone_says_so(live, model):
    stream = await live.open(model, "never-was")
    with pytest.raises(StreamLost):
        await stream.next(5)
