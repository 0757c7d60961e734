"""Which kernels run a model, and that a machine or a model without ours is served all the same."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from engine_worker.compiled import team
from engine_worker.compiled.decoder import CompiledDecoder
from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.engine.errors import UnsupportedModel
from engine_worker.runner.decoder import TorchDecoder
from tests.engine_worker.driving import request, run_tokens
from tests.engine_worker.models import make_tiny_model


@pytest.fixture
def config(tmp_path):
    model_dir = make_tiny_model(tmp_path / "llama")
    return EngineConfig(model_dir=model_dir, block_size=4, num_kv_blocks=65, max_num_seqs=8, threads=1)


def decoder_of(config):
    return build(config).core.device.executor.runner._decoder


def test_ours_where_they_can(config):
    assert isinstance(decoder_of(config), CompiledDecoder)
    assert isinstance(decoder_of(replace(config, kernels="torch")), TorchDecoder)


def test_a_model_of_another_shape_runs_on_torch(config, tmp_path):
    config = replace(config, model_dir=make_tiny_model(tmp_path / "biased", mlp_bias=True))
    assert isinstance(decoder_of(config), TorchDecoder)
    with pytest.raises(UnsupportedModel, match="biases in the MLP"):
        build(replace(config, kernels="compiled"))


def test_without_an_openmp_runtime(config, monkeypatch):
    monkeypatch.setattr(team, "AVAILABLE", False)
    # Compiling would fail there: nothing may import what compiles.
    monkeypatch.setitem(sys.modules, "engine_worker.compiled.decoder", None)
    assert isinstance(decoder_of(config), TorchDecoder)


def test_without_numba(config, monkeypatch):
    want = run_tokens(build(config), request("a", [1, 2, 3]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "engine_worker.compiled.decoder")
    assert isinstance(decoder_of(config), TorchDecoder)
    assert run_tokens(build(config), request("a", [1, 2, 3])) == want


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_lower_precisions_run(config, precision):
    (tokens,) = run_tokens(build(replace(config, precision=precision)), request("a", [1, 2, 3]))
    assert len(tokens) == 8
