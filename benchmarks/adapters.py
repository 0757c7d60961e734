"""What LoRA adapters cost a batch, on our kernels and on torch's.

    make bench-adapters                          # three rounds, some minutes on two cores

Twenty chats at once, greedy, as bench-engine's `w20`: without adapters, half of them with one of two, and all. The two
are random, of one rank, on every linear layer. Both engines are in this process, on one team of threads, and take
turns.
The last line is JSON: output tokens per second, medians, and `ratios`: ours over torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from benchmarks.engine.measure import processor
from benchmarks.engine.workload import Chat, load
from benchmarks.model import prepared
from engine_worker.config import EngineConfig, physical_cores
from engine_worker.engine.build import Built, build
from engine_worker.engine.types import EngineRequest
from engine_worker.model_store import DEFAULT_MODEL
from engine_worker.protocol import SamplingParams

_MIXES = {"none": [""], "half": ["", "first", "", "second"], "all": ["first", "second"]}
"""Whose adapter the chats have, in turn."""


def write_adapter(model_dir: Path, directory: Path, rank: int, seed: int) -> None:
    """In PEFT's format, for each linear layer of a Llama-like model."""
    config: Any = AutoConfig.from_pretrained(model_dir)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size, inner, heads, kv_heads = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * head_dim,
        config.num_key_value_heads * head_dim,
    )
    shapes = {
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (kv_heads, size),
        "self_attn.v_proj": (kv_heads, size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    noise = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=noise) * 0.02
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=noise) * 0.02
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def tokens_per_s(built: Built, chats: Sequence[Chat], adapters: Sequence[str]) -> float:
    core = built.core
    for number, chat in enumerate(chats):
        sampling = SamplingParams(max_tokens=chat.output_tokens, temperature=0.0, ignore_eos=True)
        adapter = adapters[number % len(adapters)]
        request = EngineRequest(str(number), chat.prompt, sampling, adapter=adapter)
        core.add(built.admission.admit(request, number))
    made, began = 0, time.perf_counter()
    while core.has_work:
        made += sum(len(output.token_ids) for _, output in core.step().outputs)
    taken = time.perf_counter() - began
    assert made == sum(chat.output_tokens for chat in chats)
    return made / taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "int8"))
    args = parser.parse_args()
    model_dir, chats = prepared(args.model), load("w20")
    print(
        f"{processor()}, {physical_cores()} thread(s), {model_dir.name} in {args.precision}, {len(chats)} at once, "
        f"adapters of rank {args.rank}, {args.rounds} round(s)"
    )
    with tempfile.TemporaryDirectory(prefix="weir-adapters-") as scratch:
        directories = {name: Path(scratch) / name for name in ("first", "second")}
        for seed, directory in enumerate(directories.values()):
            write_adapter(model_dir, directory, args.rank, seed)
        listed = ",".join(f"{name}={directory}" for name, directory in directories.items())
        engines = {
            kernels: build(
                EngineConfig(
                    model_dir=model_dir,
                    precision=args.precision,
                    kernels=kernels,
                    adapters=listed,
                    prefix_cache=False,
                )
            )
            for kernels in ("compiled", "torch")
        }
    for built in engines.values():
        tokens_per_s(built, [Chat(chat.prompt[:32], 4) for chat in chats], _MIXES["half"])
    speeds: dict[str, dict[str, list[float]]] = {mix: {name: [] for name in engines} for mix in _MIXES}
    for _ in range(args.rounds):
        for mix, adapters in _MIXES.items():
            for name, built in engines.items():
                speeds[mix][name].append(tokens_per_s(built, chats, adapters))
    medians = {
        mix: {name: round(statistics.median(each), 1) for name, each in of.items()}
        for mix, of in speeds.items()
    }
    ratios = {mix: round(of["compiled"] / of["torch"], 2) for mix, of in medians.items()}
    for mix, of in medians.items():
        print(
            f"  {mix:5} with an adapter: ours {of['compiled']:6.1f} tok/s   torch's {of['torch']:6.1f}   "
            f"{ratios[mix]:.2f}"
        )
    print(json.dumps({"rounds": args.rounds, "rank": args.rank, "tokens_per_s": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
