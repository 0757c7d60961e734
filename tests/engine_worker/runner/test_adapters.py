"""LoRA adapters that PEFT itself has written, in one batch, against PEFT's own merged models."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from engine_worker.attention.interface import Segment
from engine_worker.compiled.decoder import CompiledDecoder
from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.engine.errors import InvalidRequest, UnsupportedModel
from engine_worker.runner.adapters import load_adapter
from engine_worker.runner.decoder import TorchDecoder
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import greedy, make_tiny_model, reference

# PEFT still asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

_RANDOM = random.Random(4)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(n)] for n in (1, 5, 8, 17, 30)]
CONFIGS = {
    "attention": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "everywhere": LoraConfig(
        r=8,
        lora_alpha=8,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={"down_proj": 2},
        alpha_pattern={"down_proj": 12},
    ),
    "mlp": LoraConfig(r=2, lora_alpha=6, target_modules=["gate_proj", "up_proj"]),
}


def write_adapter(model_dir, directory, config, seed=0):
    torch.manual_seed(seed)
    model = get_peft_model(reference(model_dir), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # PEFT begins with B = 0, which changes nothing
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(directory, save_embedding_layers=False)


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3", "gemma3_text"])
def model_dir(request, tmp_path_factory):
    changes = {"sliding_window": 8} if request.param == "gemma3_text" else {}
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **changes)


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request, model_dir):
    if request.param == "auto" and not can_be_ours(model_dir):
        pytest.skip("torch's run this family")
    return request.param


def family(model_dir):
    return json.loads((model_dir / "config.json").read_text())["model_type"]


def can_be_ours(model_dir):
    """On our kernels adapters are of the seven layers alone, of which Phi-3 has some as one."""
    return family(model_dir) != "phi3"


def targets(model_dir, name):
    if family(model_dir) == "phi3" and name != "everywhere":
        return ["qkv_proj"] if name == "attention" else ["gate_up_proj"]
    return CONFIGS[name].target_modules


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """Name to directory."""
    found = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        found[name] = tmp_path_factory.mktemp(name)
        config = LoraConfig(**{**config.to_dict(), "target_modules": targets(model_dir, name)})
        write_adapter(model_dir, found[name], config, seed)
    return found


@pytest.fixture
def config(model_dir, kernels, adapters):
    listed = ",".join(f"{name}={directory}" for name, directory in adapters.items())
    return EngineConfig(
        model_dir=model_dir,
        adapters=listed,
        block_size=4,
        num_kv_blocks=65,
        max_num_seqs=8,
        max_num_batched_tokens=30,
        threads=2,
        precision="fp32",
        kernels=kernels,
    )


def test_several_in_one_batch_equal_their_merged_models(model_dir, adapters, config):
    expected = {"": [greedy(reference(model_dir), prompt, 10) for prompt in PROMPTS]}
    for name, directory in adapters.items():
        merged = PeftModel.from_pretrained(reference(model_dir), directory).merge_and_unload()
        expected[name] = [greedy(merged, prompt, 10) for prompt in PROMPTS]
    assert len({json.dumps(tokens) for tokens in expected.values()}) == 4, "an adapter that changes nothing"
    requests = [
        request(f"{name}{i}", prompt, 10, adapter=name)
        for i, prompt in enumerate(PROMPTS)
        for name in expected
    ]
    driver = Driver(build(config))
    results = driver.run(requests)
    got = {name: [results[f"{name}{i}"].token_ids for i in range(len(PROMPTS))] for name in expected}
    assert got == expected


def test_the_prefix_cache_keeps_adapters_apart(config, adapters):
    """The same prompt of the same tenant: with another adapter its keys and values are others."""
    built = build(config)
    prompt = PROMPTS[-1]
    names = ["", *adapters]
    first = [run_tokens(built, request(f"a{name}", prompt, 8, adapter=name))[0] for name in names]
    hits = built.core.stats().cached_prompt_tokens
    assert hits == 0
    assert [run_tokens(built, request(f"b{name}", prompt, 8, adapter=name))[0] for name in names] == first
    assert built.core.stats().cached_prompt_tokens > 0


def decoder_of(config):
    return build(config).core.device.executor.runner.decoder


def test_which_kernels(config, model_dir):
    ours = config.kernels == "auto" and can_be_ours(model_dir)
    assert isinstance(decoder_of(config), CompiledDecoder if ours else TorchDecoder)


def test_another_layer_than_ours_can_adapt_is_torchs(tmp_path):
    model_dir = make_tiny_model(tmp_path / "model")
    write_adapter(model_dir, tmp_path / "adapter", LoraConfig(r=2, target_modules=["lm_head"]))
    config = EngineConfig(model_dir=model_dir, adapters=f"a={tmp_path / 'adapter'}", num_kv_blocks=9)
    assert isinstance(decoder_of(config), TorchDecoder)
    with pytest.raises(UnsupportedModel, match="an adapter of lm_head"):
        build(replace(config, kernels="compiled"))


def last_logits(decoder, adapter, prompt, *around):
    """float32[vocab], of `prompt` behind segments of single tokens and before a longer one of the adapters `around`."""
    singles, after = around[:-1], around[-1:]
    segments = [Segment(at, 1, 1, [20 + at], name) for at, name in enumerate(singles)]
    begin, end = len(singles), len(singles) + len(prompt)
    segments.append(Segment(begin, len(prompt), len(prompt), range(1, 9), adapter))
    segments += [Segment(end, 9, 9, range(9, 12), name) for name in after]
    tokens = [*range(begin), *prompt, *range(9 * len(after))]
    positions = [*[0] * begin, *range(len(prompt)), *range(9 * len(after))]
    return decoder.forward(tokens, positions, segments, [end - 1])[0].clone()


@pytest.mark.parametrize(("precision", "error"), [("fp32", 0.0), ("fp16", 0.01), ("int8", 0.3)])
def test_on_our_kernels_a_row_depends_on_nothing_around(config, model_dir, precision, error):
    """Bit for bit, in every precision; and adapters stay in float32, whatever the weights are in."""
    if config.kernels == "torch" or not can_be_ours(model_dir):
        pytest.skip("of our kernels alone")
    exact, decoder = decoder_of(config), decoder_of(replace(config, precision=precision))
    for name in ("everywhere", "attention", "mlp"):
        alone = last_logits(decoder, name, PROMPTS[-1])
        mixed = last_logits(decoder, name, PROMPTS[-1], "mlp", "", "everywhere", "attention")
        assert alone.numpy().tobytes() == mixed.numpy().tobytes()
        want, without = last_logits(exact, name, PROMPTS[-1]), last_logits(exact, "", PROMPTS[-1])
        assert (alone - want).norm() <= error * (want - without).norm()


def test_an_unknown_adapter_is_refused(config):
    with pytest.raises(InvalidRequest, match="no adapter 'other'"):
        Driver(build(config)).add(request("a", [1, 2], adapter="other"))


def test_what_would_be_ignored_is_refused_by_name(tmp_path, model_dir):
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json"):
        load_adapter(tmp_path)
    config = LoraConfig(r=2, use_dora=True, target_modules=targets(model_dir, "attention"))
    write_adapter(model_dir, tmp_path / "dora", config)
    with pytest.raises(UnsupportedModel, match="use_dora=True is not served"):
        load_adapter(tmp_path / "dora")
    config = LoraConfig(r=2, target_modules=targets(model_dir, "attention"))
    write_adapter(model_dir, tmp_path / "pickled", config)
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match="pickles are not read"):
        load_adapter(tmp_path / "pickled")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    small = make_tiny_model(tmp_path / "small")
    large = make_tiny_model(tmp_path / "large", hidden_size=64)
    write_adapter(large, tmp_path / "adapter", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModel, match="of another model"):
        build(EngineConfig(model_dir=small, adapters=f"a={tmp_path / 'adapter'}", num_kv_blocks=9))


def test_the_setting_is_read_and_refused_by_name(tmp_path):
    config = EngineConfig(model_dir=tmp_path, adapters="a=/x,b@t1=/y")
    assert config.adapter_tenants() == {"a": "", "b": "t1"}
    for bad in ("a", "=x", "a:b=/x", "a=/x,a=/y"):
        with pytest.raises(ValueError, match="adapters"):
            EngineConfig(model_dir=tmp_path, adapters=bad)
