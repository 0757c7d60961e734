"""Packed execution against `transformers`, refusals, and the other precisions."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.runner import linears
from engine_worker.runner.families import context_length, refuse_unsupported
from engine_worker.runner.linears import PackedLinear
from engine_worker.runner.model_loader import load
from tests.engine_worker.driving import Driver, request
from tests.engine_worker.models import make_tiny_model, reference, tiny_config


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("runner"))


def test_fault_37_logits_are_causal_and_equal_to_eager(tiny_dir):
    built = build(
        EngineConfig(model_dir=tiny_dir, block_size=4, num_kv_blocks=64, threads=1, precision="fp32")
    )
    seen = []
    execute = built.core.device.executor.runner.execute
    built.core.device.executor.runner.execute = lambda step: seen.append(execute(step)) or seen[-1]
    prompts = [[5, 6, 7, 8, 9, 10], [1, 2, 3]]
    Driver(built).run(request(str(i), prompt, 1) for i, prompt in enumerate(prompts))
    model = reference(tiny_dir)
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(
                seen[0][row], model(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=1e-4
            )


def test_fault_37_an_ordinary_forward_is_refused_and_others_are_untouched(tiny_dir):
    loaded = load(tiny_dir)
    with pytest.raises(RuntimeError, match="only inside the engine"):
        loaded.model(torch.tensor([[1, 2, 3]]))
    with torch.inference_mode():
        eager = reference(tiny_dir)(torch.tensor([[1, 2, 3]])).logits
        assert eager.isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config("gpt2", n_embd=32), "'gpt2' is not served; served are: gemma2"),
        (tiny_config("gemma3_text", use_bidirectional_attention=True), "later tokens"),
        (tiny_config("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic'"),
        (tiny_config("llama", quantization_config={"quant_method": "awq"}), "quantised by other tools"),
    ],
    ids=["family", "bidirectional", "dynamic rope", "quantised"],
)
def test_what_would_give_wrong_tokens_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModel, match=message):
        refuse_unsupported(config)


def test_longrope_is_served_up_to_where_its_frequencies_change():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("phi3", rope_scaling=scaling, original_max_position_embeddings=64)
    assert context_length(config) == 64
    assert context_length(tiny_config("phi3")) == 256


def test_a_directory_without_model_or_tokenizer_is_refused(tmp_path, tiny_dir):
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        load(tmp_path)
    AutoConfig.from_pretrained(tiny_dir).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load(tmp_path)


def test_sharded_weights_are_served_and_a_missing_shard_is_named(tmp_path, tiny_dir):
    model = reference(tiny_dir)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    ours = dict(load(tmp_path).model.named_parameters())
    assert all(torch.equal(ours[name], weight) for name, weight in model.named_parameters())
    shards[1].unlink()
    with pytest.raises(UnsupportedModel, match=f"{shards[1].name} is missing"):
        load(tmp_path)


def test_pickled_weights_are_refused_unread(tmp_path, tiny_dir):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    trap = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path)
    assert not trap.exists()


def test_a_family_of_which_code_would_have_to_run_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "x.Own"}}')
    with pytest.raises(UnsupportedModel, match="'own' is not served"):
        load(tmp_path)


class _Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("fp16", 2e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize("intel", [False, True])
def test_packed_linear(intel, precision, error, rows, bias, monkeypatch):
    monkeypatch.setattr(linears, "_is_intel", lambda: intel)
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48, bias=bias)
    x = torch.randn(1, rows, 64)
    with torch.inference_mode():
        expected = plain(x)
        packed = PackedLinear(plain.weight, plain.bias, precision)(x)
    assert (packed - expected).abs().max() < error


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_run(tiny_dir, precision):
    config = EngineConfig(model_dir=tiny_dir, block_size=4, num_kv_blocks=64, threads=1, precision="fp32")
    exact = Driver(build(config)).run([request("a", [1, 2, 3], 8)])["a"]
    rounded = Driver(build(replace(config, precision=precision))).run([request("a", [1, 2, 3], 8)])["a"]
    assert len(rounded.token_ids) == len(exact.token_ids) == 8
