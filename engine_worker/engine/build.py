"""From a configuration to a core that can step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.admission import Admission
from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.core import EngineCore
from engine_worker.engine.device import Device, InlineDevice, ThreadDevice
from engine_worker.engine.executor import Executor
from engine_worker.engine.grammar import Grammars
from engine_worker.engine.meter import Meter
from engine_worker.engine.pace import Pace
from engine_worker.engine.sampler import Sampler
from engine_worker.engine.scheduler import Scheduler
from engine_worker.engine.slo import Allowance, LatencyController
from engine_worker.engine.swap import HostBlocks
from engine_worker.runner import group
from engine_worker.runner.model_loader import GPU_DTYPES, LoadedModel, load
from engine_worker.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Built:
    core: EngineCore
    admission: Admission


_FLOOR = Allowance(tokens=16, seqs=1)
"""Prompts always get on, and so does at least one request."""


def build(config: EngineConfig) -> Built:
    """Loads the model and lays out its memory. Raises UnsupportedModel."""
    loaded, runner = _load(config)
    pool = BlockPool(runner.num_blocks, config.block_size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        speculative_tokens=config.speculative_tokens,
        host=_host_blocks(config, runner),
    )
    limit = min(config.max_model_len or loaded.context_length, loaded.context_length)
    meter = Meter(config.max_num_seqs)
    return Built(
        core=EngineCore(
            _device(config, runner, Sampler(loaded.vocab_size), meter),
            scheduler,
            pool,
            pace=_pace(config),
            meter=meter,
            overlap=config.overlaps(),
        ),
        admission=Admission(
            tokenizer=loaded.tokenizer,
            special_token_ids=loaded.special_token_ids,
            eos_token_ids=loaded.eos_token_ids,
            grammars=Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids),
            vocab_size=loaded.vocab_size,
            # A sequence that the whole cache can't hold could never end.
            max_model_len=min(limit, pool.total * config.block_size),
            model_revision=str(config.model_dir),
            cached_block_size=config.block_size if config.prefix_cache else None,
            adapters=frozenset(config.adapter_dirs()),
        ),
    )


def follow(config: EngineConfig) -> None:
    """What the other processes of a group do: compute what the first one tells, until it closes."""
    _load(config)[1].follow()


def _load(config: EngineConfig) -> tuple[LoadedModel, ModelRunner]:
    torch.set_num_threads(config.thread_count())
    dtype = torch.float32 if config.device == "cpu" else GPU_DTYPES[config.precision]
    loaded = load(config.model_dir, dtype)
    return loaded, ModelRunner(config, loaded)


def _device(config: EngineConfig, runner: ModelRunner, sampler: Sampler, meter: Meter) -> Device:
    if config.device != "cpu" and group.size() == 1:
        # Here and not above: Triton exists for Linux only.
        from engine_worker.runner.pipeline import pipeline

        return pipeline(config, runner, sampler, meter)
    executor = Executor(runner, sampler, meter)
    return ThreadDevice(executor) if config.overlaps() else InlineDevice(executor)


def _host_blocks(config: EngineConfig, runner: ModelRunner) -> HostBlocks | None:
    if not runner.num_host_blocks:
        return None
    return HostBlocks(runner.num_host_blocks, block_size=config.block_size, copy_s=runner.seconds_per_move())


def _pace(config: EngineConfig) -> Pace | None:
    targets_s = config.itl_targets_s()
    if not targets_s:
        return None
    ceiling = Allowance(config.max_num_batched_tokens, config.max_num_seqs)
    return Pace(LatencyController(ceiling, _FLOOR), targets_s)
