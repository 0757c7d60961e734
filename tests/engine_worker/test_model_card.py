from __future__ import annotations

import hashlib
import json

import pytest
from structlog.testing import capture_logs

from engine_worker.model_card import read_model_card
from engine_worker.model_files import ModelFileError
from engine_worker.protocol import SamplingDefaults


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "eos_token_id": 7})
    )
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def test_a_minimal_directory(directory):
    card, tokenizer = read_model_card("m", directory, context_length=512, dtype="fp32")
    assert (card.model, card.architecture, card.context_length, card.vocab_size) == (
        "m",
        "LlamaForCausalLM",
        512,
        100,
    )
    assert (card.eos_token_ids, card.chat_template, card.bos_token) == ([7], None, None)
    assert tokenizer == b'{"a": 1}'
    assert card.tokenizer_sha256 == hashlib.sha256(tokenizer).hexdigest()


def test_generation_config_and_templates_win(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "chat_template": [
                    {"name": "tool_use", "template": "T"},
                    {"name": "default", "template": "D"},
                ],
            }
        )
    )
    card, _ = read_model_card("m", directory, context_length=512, dtype="fp32")
    assert (card.eos_token_ids, card.bos_token, card.eos_token, card.chat_template) == (
        [7, 8],
        "<s>",
        "</s>",
        "D",
    )
    (directory / "chat_template.jinja").write_text("J")
    assert read_model_card("m", directory, context_length=512, dtype="fp32")[0].chat_template == "J"


def test_what_its_makers_say_of_sampling_is_passed_on_where_it_can_be(directory):
    said = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": None,
        "do_sample": True,
    }
    (directory / "generation_config.json").write_text(json.dumps(said))

    def sampling(**more):
        return read_model_card("m", directory, context_length=1, dtype="fp32", **more)[0].sampling

    assert sampling() == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0)
    assert sampling(has_sampling=False) == SamplingDefaults()
    wrong = {"temperature": -1, "top_k": "many", "top_p": 0, "repetition_penalty": 1.05}
    (directory / "generation_config.json").write_text(json.dumps(wrong))
    with capture_logs() as logs:
        assert sampling() == SamplingDefaults(repetition_penalty=1.05)
    assert [entry["field"] for entry in logs] == ["temperature", "top_k", "top_p"]


def test_the_revision_follows_the_weights(directory):
    before = read_model_card("m", directory, context_length=1, dtype="fp32")[0].revision
    assert read_model_card("m", directory, context_length=1, dtype="fp32")[0].revision == before
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    assert read_model_card("m", directory, context_length=1, dtype="fp32")[0].revision != before


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_what_is_missing_is_named(directory, missing):
    (directory / missing).unlink()
    with pytest.raises(ModelFileError, match=missing):
        read_model_card("m", directory, context_length=1, dtype="fp32")


def test_broken_json_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json is not valid JSON"):
        read_model_card("m", directory, context_length=1, dtype="fp32")
