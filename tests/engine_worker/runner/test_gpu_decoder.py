"""The GPU's decoder on its CPU twin: late copies, graphs by batch size, padded rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.attention.interface import KVShape
from engine_worker.config import EngineConfig
from engine_worker.engine.build import Built, build
from engine_worker.engine.device import InlineDevice
from engine_worker.runner.host_streams import HostStreams
from engine_worker.runner.rings import RING, BackRing, Ring
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.engine.test_overlap import GRAMMAR
from tests.engine_worker.engine.test_speculation import PROMPTS, WAYS, same
from tests.engine_worker.models import make_tiny_model

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.attention import cuda
from engine_worker.runner.decode_numbers import KNOWN, buckets
from engine_worker.runner.gpu_decoder import GpuDecoder
from engine_worker.runner.gpu_memory import blocks_that_fit
from engine_worker.runner.model_loader import load
from engine_worker.runner.pipeline import PipelineDevice, pipeline

WINDOWS = {
    "mistral": ({"sliding_window": 8}, {(8, None)}),
    "phi3": ({"sliding_window": 8}, {(8, None)}),
    "llama": ({"sliding_window": 8}, {(None, None)}),
    "qwen3": ({}, {(None, None)}),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {(None, None), (8, None)},
    ),
    "gemma2": ({"sliding_window": 8, "attn_logit_softcapping": 2.0}, {(None, 2.0), (8, 2.0)}),
    "gemma3_text": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {(None, None), (8, None)},
    ),
}


@pytest.mark.parametrize("family", WINDOWS)
def test_attention_is_tried_with_what_the_layers_hand_to_it(family, tmp_path, monkeypatch):
    """By family: some layers don't know their own window, and Llama's may have one that it never uses."""
    tried = []

    def noted(num_heads, shape, dtype, device, scorings):
        tried.extend(scorings)
        return "noted", cuda._triton

    monkeypatch.setattr(cuda, "choose", noted)
    changes, expected = WINDOWS[family]
    loaded = load(make_tiny_model(tmp_path, family, **changes))
    config = EngineConfig(model_dir=tmp_path, num_kv_blocks=2, block_size=16, precision="fp32")
    GpuDecoder(config, loaded, KVShape(2, 2, loaded.num_kv_heads, 16, loaded.head_dim), HostStreams())
    assert {(each.window, each.softcap) for each in tried} == expected


class Careless(Ring):
    """The control: writes its buffers again without waiting for their copies."""

    def upload(self, values, target) -> None:
        self._copied = [None] * len(self._copied)
        super().upload(values, target)


class Hasty(Ring):
    """Another: copies to the device although kernels have not taken what lies there."""

    def upload(self, values, target) -> None:
        self._taken = [None] * len(self._taken)
        super().upload(values, target)


@pytest.mark.parametrize("kind", [Ring, Careless, Hasty])
def test_fault_35_a_buffer_is_not_written_before_its_copy_has_ended(kind):
    """Whatever order the streams allow, kernels see what was meant for them."""
    right = []
    for seed in range(20):
        streams = HostStreams(seed)
        ring = kind(streams, 8, torch.device("cpu"))
        target, seen = torch.zeros(8, dtype=torch.int32), []
        for number in range(4 * RING):
            ring.upload(np.full(5, number + 1, np.int32), target)
            streams.run(lambda target=target, seen=seen: seen.append(target.tolist()))
        streams.settle()
        right.append(seen == [[number + 1] * 5 + [0] * 3 for number in range(4 * RING)])
    assert all(right) is (kind is Ring)


def _count_up(numbers):
    numbers += 1


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_told_to_the_host_is_what_kernels_had_made_by_then(waits):
    right = []
    for seed in range(20):
        streams = HostStreams(seed)
        ring = BackRing(streams, 3, torch.device("cpu"))
        numbers, told = torch.zeros(3, dtype=torch.int32), []
        for _ in range(4 * RING):
            streams.run(partial(_count_up, numbers))
            if not waits:
                ring._told = [None] * RING
            told.append(ring.download(numbers[:2]))
        right.append([each.values() for each in told] == [[n + 1] * 2 for n in range(4 * RING)])
    assert all(right) is waits


def test_a_copy_up_does_not_wait_for_the_kernels_of_the_step_before():
    streams = HostStreams()
    ring = Ring(streams, 2, torch.device("cpu"))
    target = torch.zeros(2, dtype=torch.int32)
    ring.upload(np.ones(2, np.int32), target)
    streams.run(lambda: pytest.fail("nobody waits for these kernels"))
    ring.upload(np.ones(2, np.int32), target)
    ring._copied[1].wait()
    assert ring._device[1].tolist() == [1, 1]


def test_graphs_are_few_and_waste_little():
    for most in (1, 5, 8, 64, 256):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            taken = next(size for size in sizes if size >= rows)
            assert taken - rows <= max(1, rows // 4 + 1) or rows < 8
    assert len(buckets(256)) < 24


def test_the_cache_gets_what_the_rest_leaves():
    assert blocks_that_fit(total=1000, utilization=0.9, peak=400, block_bytes=70) == 7
    assert blocks_that_fit(total=1000, utilization=0.3, peak=400, block_bytes=70) == 0


@pytest.fixture
def plain_writes(monkeypatch):
    monkeypatch.setattr(cuda, "write_kv", _write)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return EngineConfig(
        model_dir=make_tiny_model(tmp_path_factory.mktemp("tiny")),
        block_size=4,
        num_kv_blocks=60,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=88,
        threads=1,
        kernels="torch",
        precision="fp32",
        swap_memory=0,
    )


def twin(config: EngineConfig, seed: int = 0, *, plain: bool = True) -> tuple[Built, GpuDecoder]:
    """An engine whose steps are those of a GPU, on the CPU."""
    built = build(config)
    runner = built.core.device.executor.runner
    shape = runner.decoder._attention.shape
    decoder = GpuDecoder(config, load(config.model_dir), shape, HostStreams(seed))
    if plain:
        decoder._attention.kernel = _attend
    decoder.keys[:, 0] = decoder.values[:, 0] = torch.nan  # what padded rows read
    runner._decoder = decoder
    runner._host = [
        torch.zeros(len(cache), runner.num_host_blocks, *cache.shape[2:], dtype=cache.dtype)
        for cache in decoder.caches
    ]
    executor = built.core.device.executor
    built.core.device.close()
    built.core.device = pipeline(config, runner, executor._sampler, executor._meter)
    return built, decoder


class Unthreaded(PipelineDevice):
    """Launches at once, so that no token is known too soon by chance."""

    def _run(self, work):
        return InlineDevice._run(self, work)


def _write(key, value, keys, values, slots) -> None:
    keys.flatten(0, 1)[slots.long()], values.flatten(0, 1)[slots.long()] = key, value


def _attend(query, keys, values, layout, scoring) -> torch.Tensor:
    """In plain torch: what the kernels give, without the interpreter's patience."""
    out, group = torch.empty_like(query), query.shape[1] // keys.shape[2]
    for row, length in enumerate(layout.seq_lens.tolist()):
        first, end = layout.query_starts[row : row + 2].tolist()
        held = layout.block_tables[row, : -(-length // keys.shape[1])].long()
        key, value = (
            part[held].flatten(0, 1)[:length].repeat_interleave(group, 1) for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key) * scoring.scale
        hidden = torch.ones_like(scores[0]).triu(length - (end - first) + 1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return out


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")


@on_cpu
def test_fault_34_the_engine_gives_the_same_tokens_through_padded_graphs(tiny):
    asked = [request(str(i), [i + 1] * n, 4 + i) for i, n in enumerate((1, 4, 9))]
    want = run_tokens(build(tiny), *asked)
    built, decoder = twin(replace(tiny, overlap=True), plain=False)
    results = Driver(built).run(asked)
    assert [results[item.request_id].token_ids for item in asked] == want
    assert decoder._streams.captured == len(decoder._graphs) + len(decoder._choice_graphs)
    assert len(decoder._graphs) >= 2
    assert 4 in decoder._graphs, "three sequences ran as four rows"
    built.core.device.close()


@on_cpu
@pytest.mark.usefixtures("plain_writes")
@given(st.data())
@settings(max_examples=10, deadline=None)
def test_fault_25_26_28_any_history_gives_the_tokens_of_the_reference(tiny, data):
    """Every way to choose, mixed, in both loops, with preemptions; streams run in any order that events allow."""
    ways = {**WAYS, "top": {"temperature": 1.3, "seed": 6, "top_k": 40, "top_p": 0.8, "min_p": 0.01}}
    ways["nucleus"] = {"temperature": 2.0, "seed": 7, "top_p": 0.6}
    ways["penalised"] = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.7}
    ways["grammar"] = {"grammar": GRAMMAR, "ignore_eos": False, "temperature": 0.8, "seed": 3}
    ways["one bad word"] = {"bad_words": ("a",), "temperature": 1.0, "seed": 9}
    ways["scored"] = {"prompt_logprobs": 1}
    drawn = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(ways)), st.integers(0, 3)), min_size=1, max_size=6)
    )
    asked = [
        request(f"{i} {way}", PROMPTS[prompt], 20 + i, **ways[way]) for i, (way, prompt) in enumerate(drawn)
    ]
    delays = [data.draw(st.integers(0, 2)) for _ in asked]
    config = replace(
        tiny,
        overlap=data.draw(st.booleans()),
        num_kv_blocks=data.draw(st.sampled_from([22, 30, 60])),
        speculative_tokens=data.draw(st.sampled_from([0, 0, 2])),
        swap_memory=data.draw(st.sampled_from([0, 1 << 20])),
    )
    expected = Driver(build(replace(tiny, num_kv_blocks=400))).run(asked)
    built, _ = twin(config, data.draw(st.integers(0, 9)))
    if config.overlap and data.draw(st.booleans(), label="unthreaded"):
        built.core.device = Unthreaded(built.core.device.executor)
    try:
        driver = Driver(built)
        for item, delay in zip(asked, delays, strict=True):
            driver.add(item)
            for _ in range(delay):
                driver.step()
        same(driver.run(), expected)
    finally:
        built.core.device.close()


@on_cpu
@pytest.mark.usefixtures("plain_writes")
def test_rows_that_fill_a_graph_up_are_counted(tiny):
    built, decoder = twin(replace(tiny, overlap=False, prefix_cache=False))
    run_tokens(built, *(request(str(i), [i + 1] * 3, 5) for i in range(3)))
    assert 3 not in decoder._sizes
    assert built.core.meter.padding_tokens == 4, "one row in each of four steps"
    assert built.core.meter.scheduled_tokens == 3 * (3 + 4)


@on_cpu
@pytest.mark.usefixtures("plain_writes")
def test_a_step_is_launched_before_anybody_knows_the_tokens_of_the_one_before(tiny):
    built, decoder = twin(replace(tiny, overlap=True))
    built.core.device = Unthreaded(built.core.device.executor)
    asked = request("a", [1, 2, 3], 9)
    known: list[bool] = []
    launch = decoder.launch

    def watched(token_ids, positions, segments, sampled, sources):
        known.append(KNOWN in sources)
        launch(token_ids, positions, segments, sampled, sources)

    decoder.launch = watched
    results = Driver(built).run([asked])
    assert len(results["a"].token_ids) == 9
    assert known == [True, *[False] * 8], "every token but the prompt's came from the device itself"
    built.core.device.close()


@on_cpu
@pytest.mark.usefixtures("plain_writes")
@pytest.mark.parametrize("overlap", [False, True])
def test_fault_31_a_row_of_nan_fails_alone(tiny, overlap):
    built, decoder = twin(replace(tiny, overlap=overlap))
    expected = run_tokens(build(tiny), request("good", PROMPTS[1], 12))
    driver = Driver(built)
    bad = driver.add(request("bad", PROMPTS[3], 12))
    driver.add(request("good", PROMPTS[1], 12))
    for _ in range(5):
        driver.step()
    blocks = list(driver.core._live[bad].table.blocks)
    decoder._streams.run(lambda: decoder.keys[:, blocks].fill_(0))
    decoder._streams.run(lambda: decoder.keys.__setitem__((slice(None), blocks), torch.nan))
    results = driver.run()
    assert results["bad"].finish.reason == "error"
    assert [results["good"].token_ids] == expected
    built.core.device.close()


@on_cpu
@pytest.mark.usefixtures("plain_writes")
def test_a_step_that_can_not_be_launched_fails_and_the_one_behind_it_comes_again(tiny):
    built, decoder = twin(replace(tiny, overlap=True))
    asked = [request("a", PROMPTS[1], 12), request("b", PROMPTS[3], 12)]
    expected = run_tokens(build(tiny), *asked)
    launch, calls = decoder.launch, []

    def once_more(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no room for this step")
        launch(*arguments)

    decoder.launch = once_more
    results = Driver(built).run(asked)
    assert [results[item.request_id].token_ids for item in asked] == expected
    built.core.device.close()


@on_cpu
def test_rotary_frequencies_keep_their_precision(tiny):
    config = replace(tiny, precision="fp16")
    loaded = load(config.model_dir, torch.bfloat16)
    decoder = GpuDecoder(config, loaded, KVShape(2, 4, 2, 4, 8))
    assert decoder._model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert decoder.keys.dtype == decoder._model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_settings_that_a_gpu_can_not_serve_are_named(tmp_path):
    for changes in ({"precision": "int8"}, {"adapters": "a=/x"}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=r"GPU|device"):
            EngineConfig(**{"model_dir": tmp_path, "device": "cuda", **changes})
