"""The wire format: round trips, tolerance towards newer peers, refusal of other versions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker import protocol
from engine_worker.broker.commands import ModelAnswer, ModelCommand, ProcessStatus
from engine_worker.protocol import (
    Chunk,
    EngineError,
    Finish,
    GenerateRequest,
    ModelCard,
    PositionLogprobs,
    ProtocolError,
    ProtocolVersionError,
    SamplingDefaults,
    SamplingParams,
    TokenLogprob,
    UsageEvent,
    WorkerStarting,
    WorkerStatus,
    decode,
    encode,
)

SAMPLING = SamplingParams(
    max_tokens=5,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.3,
    logit_bias={7: -1.5},
    min_tokens=2,
    stop=("\n", "é"),
    stop_token_ids=(2,),
    ignore_eos=True,
    seed=2**53,
    logprobs=3,
)
MESSAGES: list[Any] = [
    GenerateRequest(
        request_id="r1",
        model="m",
        tenant_id="t",
        tier="batch",
        tier_rank=2,
        prompt_token_ids=[0, 1, 2**31],
        sampling=SAMPLING,
        created_at_ms=1,
        deadline_ms=2,
        reply_channel="weir:live:g",
        reservation_id="res",
        key_id="k",
        user_id="u",
        endpoint="completions",
        cache_salt="s",
        trace={"traceparent": "00-1-2-01"},
    ),
    Chunk(
        request_id="r1",
        epoch=2,
        seq=3,
        token_ids=[4, 5],
        text="añ🙂",
        logprobs=[PositionLogprobs(TokenLogprob(4, -0.5), (TokenLogprob(9, -1.25),))],
        finish=Finish(
            reason="error",
            prompt_tokens=1,
            completion_tokens=5,
            cached_tokens=1,
            stop_reason=2,
            error=EngineError(code="c", message="m"),
        ),
        prompt_logprobs=[PositionLogprobs(TokenLogprob(4, -0.5), rank=7)],
        queued_ms=12,
    ),
    UsageEvent(
        request_id="r1",
        tenant_id="t",
        model="m",
        tier="batch",
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=2,
        created_at_ms=3,
        finished_at_ms=4,
        attempts=1,
        worker_id="w",
    ),
    ModelCard(
        model="m",
        revision="r",
        architecture="a",
        context_length=1,
        vocab_size=2,
        eos_token_ids=[1],
        tokenizer_sha256="s",
        chat_template="{{ x }}",
        sampling=SamplingDefaults(temperature=0.6, top_k=20),
    ),
    WorkerStarting(worker_id="w", model="m", stage="compiling", for_s=1.5),
    WorkerStatus(
        worker_id="w",
        model="m",
        device="cpu",
        started_at_ms=1,
        updated_at_ms=2,
        steps=3,
        running=4,
        waiting=5,
        max_num_seqs=6,
        kv_blocks_total=7,
        kv_blocks_used=8,
        step_ms=9.5,
    ),
    ModelCommand(command_id="c", action="load", model="m", source="/models/m"),
    ModelAnswer(command_id="c", models=["m"], error="no", code="no_place"),
    ProcessStatus(
        worker_id="w",
        started_at_ms=1,
        updated_at_ms=2,
        max_models=3,
        models=["m"],
        command_id="c",
        host="h",
        device="cpu",
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert decode(encode(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_unknown_fields_are_ignored(message):
    fields = msgspec.msgpack.decode(encode(message))
    fields["of_a_newer_version"] = {"a": [1]}
    assert decode(msgspec.msgpack.encode(fields), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_another_version_is_refused_by_name(message):
    fields = msgspec.msgpack.decode(encode(message))
    assert fields["v"] == protocol.PROTOCOL_VERSION, (
        "the version must be on the wire, also when it is the default"
    )
    fields["v"] = 99
    with pytest.raises(ProtocolVersionError, match="version 99") as refused:
        decode(msgspec.msgpack.encode(fields), type(message))
    assert refused.value.found == 99
    del fields["v"]
    with pytest.raises(ProtocolVersionError, match="version 0"):
        decode(msgspec.msgpack.encode(fields), type(message))


def test_fields_that_lack_or_have_the_wrong_type_are_a_protocol_error():
    with pytest.raises(ProtocolError, match="Chunk"):
        decode(msgspec.msgpack.encode({"v": 1, "request_id": "r1"}), Chunk)
    with pytest.raises(ProtocolError, match="Chunk"):
        decode(msgspec.msgpack.encode({"v": 1, "request_id": 5, "epoch": 1, "seq": 0}), Chunk)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode(data, Chunk)


@given(
    seq=st.integers(0, 2**31),
    token_ids=st.lists(st.integers(0, 2**31)),
    text=st.text(),
    epoch=st.integers(0, 2**31),
)
def test_any_chunk_survives(seq, token_ids, text, epoch):
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no text that a tokenizer can make
    chunk = Chunk(request_id="r", epoch=epoch, seq=seq, token_ids=token_ids, text=text)
    assert decode(encode(chunk), Chunk) == chunk
