"""How one engine is set up: a frozen value that every part reads and none changes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Precision = Literal["fp32", "fp16", "int8"]
Kernels = Literal["auto", "torch", "compiled"]
Backend = Literal["weir", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError, naming the field, when they contradict each other."""

    model_dir: Path
    """A Hugging Face model directory: config.json, safetensors, tokenizer.json."""
    precision: Precision = "fp16"
    """Of the weights of linear layers on the CPU; all arithmetic is in float32. `fp32` is token-exact against
    `transformers`; what the others cost in quality: docs/engine.md."""
    kernels: Kernels = "auto"
    """On the CPU: `compiled`, ours (`engine_worker/compiled`), or `torch`; `auto` takes ours where they can run."""
    backend: Backend = "weir"
    """`vllm`: vLLM computes (engine_worker/vllm_engine.py); a package of its own, docs/operations.md."""
    vllm_args: str = ""
    """Fields of vLLM's own AsyncEngineArgs as a JSON object, such as {"tensor_parallel_size": 4}."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    threads: int | None = None
    """Threads inside an operation; not given: one per physical core that this process may use."""
    block_size: int = 32
    """Tokens per KV block, shared between requests when full; the last one of a sequence is half empty on average."""
    num_kv_blocks: int | None = None
    """KV blocks in all, scratch block included; not given: as many as `kv_cache_memory` holds."""
    kv_cache_memory: int = 2 << 30
    """Bytes for keys and values of all layers. On the CPU a page that is never used costs nothing."""
    swap_memory: int = 512 << 20
    """Bytes of host memory for the blocks of preempted requests, used where copying them is cheaper than computing
    their tokens again; 0: none. On the CPU it costs nothing until it is used."""
    prefix_cache: bool = True
    """Keep full blocks for requests of the same tenant that begin with the same tokens."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens computed per step: every decode first, then chunks of prompts."""
    overlap: bool | None = None
    """Schedule and launch each step while the one before it runs: the same tokens; docs/engine.md. Not given: on
    a GPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, the largest step and the KV cache, which gets what the others leave."""
    max_model_len: int | None = None
    """Prompt plus output; not given: what the model was trained for. Never more than the KV cache holds."""

    adapters: str = ""
    """LoRA adapters in PEFT's format: "NAME=DIRECTORY,...". NAME@TENANT is for the tenant of that public id
    alone. Clients ask for MODEL:NAME."""
    speculative_tokens: int = 0
    """Guess so many tokens at most, from what the text has said before, and verify them in one step; 0: never.
    It pays with few sequences and texts that repeat, and pauses for those that don't."""
    itl_targets_ms: str = ""
    """Targets for the time between two tokens (90th percentile), by tier rank: "0:100,1:250". A rank that is
    not named has none. The engine computes less per step, and at worst runs fewer requests, to keep them."""

    def __post_init__(self) -> None:
        self.itl_targets_s()
        self.adapter_dirs()
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, it is {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Otherwise a full batch of decodes would not fit in a step and the last would starve.
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs a token per step"
            )
        if self.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:N, it is {self.device!r}")
        if self.device != "cpu" and (self.precision == "int8" or self.adapters):
            raise ValueError("a GPU takes neither precision int8 nor adapters yet")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, it is {self.gpu_memory_utilization}"
            )
        if self.swap_memory < 0:
            raise ValueError(f"swap_memory must be 0 or more, it is {self.swap_memory}")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 2:
            raise ValueError("num_kv_blocks must be at least 2: one is scratch, one holds tokens")
        if self.precision not in ("fp32", "fp16", "int8"):
            raise ValueError(f"precision must be fp32, fp16 or int8, it is {self.precision!r}")
        if self.kernels not in ("auto", "torch", "compiled"):
            raise ValueError(f"kernels must be auto, torch or compiled, it is {self.kernels!r}")

        if self.backend not in ("weir", "vllm"):
            raise ValueError(f"backend must be weir or vllm, it is {self.backend!r}")
        if self.backend == "vllm" and (self.adapters or self.itl_targets_ms or self.precision == "int8"):
            raise ValueError("backend vllm takes neither adapters nor itl_targets_ms nor precision int8")
        if self.vllm_args and self.backend != "vllm":
            raise ValueError("vllm_args are for backend vllm")
        self.vllm_fields()

    def vllm_fields(self) -> dict[str, Any]:
        """What `vllm_args` says."""
        try:
            fields = json.loads(self.vllm_args or "{}")
        except ValueError as error:
            raise ValueError(f"vllm_args must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"vllm_args must be a JSON object, it is {self.vllm_args!r}")
        return fields

    def adapter_dirs(self) -> dict[str, Path]:
        return {name: directory for name, _, directory in self._adapters()}

    def adapter_tenants(self) -> dict[str, str]:
        """The public id of the tenant that each adapter is for; "": for all."""
        return {name: tenant for name, tenant, _ in self._adapters()}

    def _adapters(self) -> list[tuple[str, str, Path]]:
        found = []
        for text in filter(None, self.adapters.split(",")):
            who, equals, directory = text.partition("=")
            name, _, tenant = who.partition("@")
            if not (equals and name and directory) or ":" in name:
                raise ValueError(f"adapters must be NAME=DIRECTORY or NAME@TENANT=DIRECTORY, it has {text!r}")
            found.append((name, tenant, Path(directory)))
        if len({name for name, _, _ in found}) < len(found):
            raise ValueError("adapters must have different names")
        return found

    def itl_targets_s(self) -> dict[int, float]:
        """Seconds by tier rank."""
        targets: dict[int, float] = {}
        for pair in filter(None, self.itl_targets_ms.split(",")):
            rank, _, milliseconds = pair.partition(":")
            try:
                targets[int(rank)] = float(milliseconds) / 1000
            except ValueError as error:
                raise ValueError(
                    f"itl_targets_ms must be RANK:MS pairs, like 0:100,1:250; it has {pair!r}"
                ) from error
            if not targets[int(rank)] > 0:
                raise ValueError(f"itl_targets_ms must be positive, it has {pair!r}")
        return targets

    def overlaps(self) -> bool:
        return self.device != "cpu" if self.overlap is None else self.overlap

    def thread_count(self) -> int:
        return self.threads or physical_cores()


def physical_cores() -> int:
    """Physical cores that this process may run on: a second thread on a core only fights for its vector units."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: set[str] = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            siblings = (topology / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))
