"""Embeddings through the same queue and worker, against a direct forward of `transformers`."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.engine.embedding_engine import EmbeddingEngine
from engine_worker.engine.errors import InvalidRequest, UnsupportedModel
from engine_worker.engine.types import EngineRequest
from engine_worker.model_store import EMBEDDING_MODEL, ModelStoreError, ensure_model
from engine_worker.outbox import Outbox
from engine_worker.protocol import Chunk, FinishReason, SamplingParams, decode, encode
from engine_worker.runner.encoder import Encoder
from tests.engine_worker.contract import LifeContract, stop_and_see_all_end
from tests.engine_worker.models import alone, make_tiny_encoder

TEXTS = [[1, 2, 3], [7] * 20, [5], list(range(40, 70)), [9, 8]]


@pytest.fixture
def model_dir(tmp_path):
    return make_tiny_encoder(tmp_path)


def ask(name, text, **given):
    return EngineRequest(name, text, SamplingParams(max_tokens=1), **given)


async def collect(engine, count):
    """Outputs by request, and how many each step gave."""
    found, sizes = {}, []
    async with asyncio.timeout(30):
        async for step in engine.steps():
            found |= {output.request_id: output for output in step.outputs}
            sizes.append(len(step.outputs))
            if len(found) == count:
                return found, sizes


@pytest.fixture
async def engine(model_dir):
    config = EngineConfig(model_dir=model_dir, max_num_seqs=8, max_num_batched_tokens=64, threads=1)
    engine = EmbeddingEngine(config)
    await engine.start()
    yield engine
    await engine.stop()


class TestLife(LifeContract):
    END = FinishReason.STOP

    async def test_stop_ends_everything(self, engine):
        await stop_and_see_all_end(engine)


async def test_batches_by_token_budget_equal_each_text_alone(engine, model_dir):
    for i, text in enumerate(TEXTS):
        engine.add(ask(str(i), text))
    found, sizes = await collect(engine, len(TEXTS))
    assert sizes == [3, 2], "3 x 20 padded tokens fit into 64, a fourth of 30 does not"
    for i, text in enumerate(TEXTS):
        vector = np.frombuffer(found[str(i)].embedding, dtype="<f4")
        torch.testing.assert_close(
            torch.from_numpy(vector.copy()), alone(model_dir, text), rtol=1e-4, atol=1e-5
        )
        finish = found[str(i)].finish
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("stop", len(text), 0)


async def test_better_tiers_go_first_and_what_is_cancelled_or_late_has_no_vector(engine):
    for i in range(3):
        engine.add(ask(f"low{i}", [1] * 60, priority=(2, 0.0)))
    engine.add(ask("high", [1] * 60, priority=(0, 0.0)))
    engine.add(ask("late", [1], deadline_ms=1))
    engine.abort("low0")
    order = []
    async with asyncio.timeout(30):
        async for step in engine.steps():
            order += [(output.request_id, output.finish.reason) for output in step.outputs]
            if len(order) == 5:
                break
    assert order == [
        ("low0", "cancelled"), ("late", "deadline"), ("high", "stop"), ("low1", "stop"), ("low2", "stop"),
    ]  # fmt: skip
    assert engine.room() == 8


async def test_a_text_that_breaks_the_batch_fails_alone(engine):
    encode_all = engine.encoder.encode

    def fails(texts):
        if [13] in texts:
            raise RuntimeError("unlucky")
        return encode_all(texts)

    engine.encoder.encode = fails
    for name, text in (("a", [1]), ("bad", [13]), ("b", [2])):
        engine.add(ask(name, text))
    found, _ = await collect(engine, 3)
    assert {name: output.finish.reason for name, output in found.items()} == {
        "a": "stop", "bad": "error", "b": "stop",
    }  # fmt: skip
    meter = engine.meter
    assert (meter.errors, meter.finished) == ({"engine_error": 1}, {"stop": 2, "error": 1})
    assert (meter.scheduled_tokens, meter.wasted_tokens) == (6, 4), "the batch, then each text alone"


async def test_what_batches_took_is_measured(engine):
    for i, text in enumerate(TEXTS):
        engine.add(ask(str(i), text))
    await collect(engine, len(TEXTS))
    meter, tokens = engine.meter, sum(map(len, TEXTS))
    counts = (meter.time_to_first_token, meter.queue, meter.prefill)
    assert [sum(each.counts) for each in counts] == [len(TEXTS)] * 3
    assert meter.time_to_first_token.sum == pytest.approx(meter.queue.sum + meter.prefill.sum)
    assert (meter.scheduled_tokens, meter.wasted_tokens, meter.sequence_steps) == (tokens, 0, len(TEXTS))
    assert meter.padding_tokens == 3 * 20 + 2 * 30 - tokens
    assert meter.phase_s["compute"] > 0
    assert meter.phase_s["schedule"] > 0


async def test_texts_of_one_request_come_back_in_its_order(engine, model_dir):
    texts = [*TEXTS, [3] * 50, [1, 2]]
    ids = [token for text in texts for token in text]
    engine.add(ask("many", ids, text_lengths=[len(text) for text in texts]))
    engine.add(ask("one", [5]))
    found, sizes = await collect(engine, 2)
    assert sizes == [0, 0, 2], "50 tokens alone, 2 x 30 padded, then all short ones, the other request's too"
    vectors = np.frombuffer(found["many"].embedding, dtype="<f4").reshape(len(texts), -1)
    for vector, text in zip(vectors, texts, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(vector.copy()), alone(model_dir, text), rtol=1e-4, atol=1e-5
        )
    assert found["many"].finish.prompt_tokens == sum(map(len, texts))
    assert (engine.stats().prompt_tokens, engine.room()) == (sum(map(len, texts)) + 1, 8)


async def test_one_bad_text_fails_its_request_and_no_other(engine):
    encode_all = engine.encoder.encode

    def fails(texts):
        if [13] in texts:
            raise RuntimeError("unlucky")
        return encode_all(texts)

    engine.encoder.encode = fails
    engine.add(ask("bad", [1, 2, 13], text_lengths=[2, 1]))
    engine.add(ask("good", [1, 2, 3], text_lengths=[2, 1]))
    found, _ = await collect(engine, 2)
    assert {name: output.finish.reason for name, output in found.items()} == {"bad": "error", "good": "stop"}
    assert found["bad"].embedding is None


async def test_refusals(engine):
    for lengths in ([2, 2], [3, 0], [4, -1]):
        with pytest.raises(InvalidRequest, match="add up"):
            engine.add(ask("x", [1, 2, 3], text_lengths=lengths))
    for text, message in (([], "empty"), ([1] * 65, "65 tokens, this model takes 64"), ([999], "go from 0")):
        with pytest.raises(InvalidRequest, match=message):
            engine.add(ask("x", text))


def test_another_pooling_is_refused_by_name(model_dir):
    (model_dir / "1_Pooling").mkdir()
    (model_dir / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UnsupportedModel, match="max_tokens is not served"):
        Encoder.load(model_dir)


async def test_the_vector_travels_through_queue_and_log(engine, model, gateway, worker, make):
    await gateway.enqueue(make("r1"), max_queued=9, max_queued_per_tenant=9)
    (claim,) = await worker.claim(1)
    outbox = Outbox()
    engine_id = outbox.hold(claim)
    engine.add(ask(engine_id, claim.request.prompt_token_ids))
    found, _ = await collect(engine, 1)
    outbox.take(found.values())
    batch = outbox.batch()
    assert outbox.settle(batch, await worker.publish(batch)).finished
    assert (await gateway.request_state(model, "r1")).state == "finished"
    (chunk,) = batch[0].chunks
    assert b64decode(decode(encode(chunk), Chunk).embedding) == found[engine_id].embedding


def test_the_real_model_knows_what_is_alike(tmp_path):
    try:
        directory = ensure_model(EMBEDDING_MODEL, tmp_path)
    except ModelStoreError as absent:
        pytest.skip(str(absent))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    cat, kitten, rates = Encoder.load(directory).encode([tokenizer.encode(text).ids for text in texts])
    assert cat.norm() == pytest.approx(1.0, abs=1e-5)
    assert cat @ kitten > 0.5 > 0.2 > cat @ rates
