"""Steps, graphs and copies on a GPU where there is one, and on its twin elsewhere.

`benchmarks/gpu.sh` runs this where nothing but torch, transformers, triton and pytest is installed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("triton", reason="Triton exists for Linux only")

from benchmarks.gpu import models
from benchmarks.gpu.stepper import DRAWN, GREEDY, SHAPED, Sampling, Stepper, random_model
from engine_worker.attention.kernels import INTERPRETED
from engine_worker.runner.gpu_sampler import Choosing, Level, Settings, choose, pack
from engine_worker.runner.host_streams import HostStreams
from engine_worker.runner.rings import BackRing, Ring
from engine_worker.runner.streams import CudaStreams, Streams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 20 if INTERPRETED else 500


def streams() -> Streams:
    return CudaStreams(DEVICE) if DEVICE.type == "cuda" else HostStreams()


@pytest.fixture(scope="module")
def model():
    return random_model(models.configs(tiny=True)["tiny"], DEVICE, torch.float32)


WINDOW = 6
"""Tokens: a block of four, and half of the next."""
FAMILIES = {
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    "llama": {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_decodes_as_transformers_do(family):
    tiny = models.configs(tiny=True)["tiny"].to_diff_dict()
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {name: tiny[name] for name in same} | {"num_key_value_heads": 2, "initializer_range": 0.3}
    if family != "phi3":
        settings["head_dim"] = 16
    config = AutoConfig.for_model(family, **settings | FAMILIES[family])
    model = random_model(config, DEVICE, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which are 1 and 0 in a new model
                parameter.add_(torch.randn_like(parameter) * 0.3)
    given = models.prompts(model, 3, 11)  # so long that none decodes alike without its window
    # A budget below the prompts' length: chunks.
    tokens = list(models.generate(model, given, 6, budget=5, block_size=4))[1:]
    model.set_attn_implementation("eager")
    for row, prompt in enumerate(given):
        output = model.generate(
            torch.tensor([prompt], device=DEVICE),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=DEVICE),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [step[row] for step in tokens] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("sampling", [DRAWN, SHAPED])
def test_a_run_that_is_made_again_gives_the_same(model, sampling):
    """With every graph captured at the start, as a worker does, and without."""
    runs = []
    for warms in (False, True):
        stepper = Stepper(model, rows=3, room=24, block_size=4, budget=12, sampling=sampling)
        if warms:
            stepper.decoder.warm()
        for _ in range(2):
            first = models.prefill(stepper, models.prompts(model, 3, 7), 12)
            stepper.start_decoding(7, first)
            runs.append([first, *(told.values() for told in [stepper.decode() for _ in range(3)])])
    assert all(run == runs[0] for run in runs)
    assert len({tuple(step) for step in runs[0]}) > 1


def test_a_graph_chooses_what_the_same_operations_choose_on_the_cpu():
    rows, blocks, vocab = 5, 3, 300
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab, (20, 4), generator=random, dtype=torch.int32)
    samplings = [
        GREEDY,
        Sampling(temperature=0.7, seed=5),
        Sampling(temperature=1.2, top_k=9, seed=6),
        Sampling(temperature=1.0, top_p=0.8, min_p=0.01, seed=2**63 + 1),
        Sampling(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.2),
    ]
    device_streams = streams()
    logits, settings = (
        torch.empty(rows, vocab, device=DEVICE),
        torch.zeros(20_000, dtype=torch.int32, device=DEVICE),
    )
    chosen, held = torch.zeros(rows, dtype=torch.int64, device=DEVICE), tokens.to(DEVICE)
    views = Settings(settings, rows, blocks)

    def run(level: Level) -> None:
        chosen.copy_(choose(logits, views, held, level))

    logits.zero_()
    ring = Ring(device_streams, len(settings), DEVICE)
    ring.upload(pack([], rows, blocks, vocab), settings)
    graphs = {level: device_streams.capture(lambda level=level: run(level)) for level in Level}
    for round_ in range(ROUNDS // 10):
        given = torch.randn(rows, vocab, generator=random) * 3
        choosing = [
            Choosing(one, 4, 9 + round_ % 3, [1 + row, 9 + row, 14 + row], [(7, 2.5), (row, -torch.inf)])
            for row, one in enumerate(samplings)
        ]
        for level, graph in graphs.items():
            packed = pack(choosing, rows, blocks, vocab)
            device_streams.settle()
            logits.copy_(given)
            ring.upload(packed, settings)
            device_streams.run(graph)
            device_streams.settle()
            want = choose(given, Settings(torch.from_numpy(packed), rows, blocks), tokens, level)
            assert chosen.tolist() == want.tolist()


def test_fault_35_rings_under_load():
    """Kernels that take their time between copies both ways: nothing is overwritten, nothing comes late."""
    device_streams = streams()
    ring, back = Ring(device_streams, 512, DEVICE), BackRing(device_streams, 512, DEVICE)
    target = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    size = 16 if INTERPRETED else 2048
    weight = torch.randn(size, size, device=DEVICE)

    def work() -> None:
        _ = weight @ weight
        target.mul_(2)

    told = []
    for number in range(ROUNDS):
        ring.upload(np.full(512, number, np.int32), target)
        device_streams.run(work)
        told.append(back.download(target))
    for number, each in enumerate(told):
        assert set(each.values()) == {2 * number}
