"""Whole models: decode against the bandwidth roofline, first tokens under load, and `transformers` beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from benchmarks.gpu.kernels import BLOCK_SIZE, Roof
from benchmarks.gpu.report import Report, make_room, seconds, synchronize
from benchmarks.gpu.stepper import DRAWN, GREEDY, SHAPED, Stepper
from engine_worker.attention import interface
from engine_worker.runner.gpu_sampler import Choosing
from engine_worker.runner.rings import Told

_COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def configs(*, tiny: bool) -> dict[str, PretrainedConfig]:
    """Real shapes, no real weights."""
    if tiny:
        return {"tiny": _config("llama", 300, 32, 48, 2, 4, 2, 8, tie=True)}
    return {
        "Qwen3-0.6B": _config("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, tie=True),
        "Llama-3.2-1B": _config("llama", 128256, 2048, 8192, 16, 32, 8, 64, tie=True),
        "Llama-3.1-8B": _config("llama", 128256, 4096, 14336, 32, 32, 8, 128, tie=False),
    }


def _config(
    family: str,
    vocab: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    tie: bool,
) -> PretrainedConfig:
    return AutoConfig.for_model(
        family,
        # Large weights, so that greedy choices are no ties.
        initializer_range=0.3 if hidden < 64 else 0.02,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        tie_word_embeddings=tie,
        max_position_embeddings=8192,
        **_COMMON,
    )


def weight_bytes(model: torch.nn.Module) -> int:
    """Read by each decode step: everything but the rows of the embedding that are not looked up."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.get_input_embeddings().weight.nbytes


def prompts(model: Any, rows: int, length: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    given: list[list[int]] = torch.randint(model.config.vocab_size, (rows, length), generator=random).tolist()
    return given


def prefill(stepper: Stepper, given: list[list[int]], budget: int) -> list[int]:
    """All of `given`, in steps of whole prompts or, where one is too long for a step, in chunks: what follows each."""
    length = len(given[0])
    first: list[int] = []
    per_step = max(1, budget // length)
    for row in range(0, len(given), per_step):
        rows = range(row, min(len(given), row + per_step))
        for begin in range(0, length, budget):
            told = stepper.compute([(r, begin, given[r][begin : begin + budget]) for r in rows])
        first += told.values()
    return first


def _decode_steps(stepper: Stepper, context: int, ids: list[int], steps: int) -> None:
    """As the engine's loop: a step is launched, then the tokens of the one before are waited for."""
    stepper.start_decoding(context, ids)
    before = stepper.decode()
    for _ in range(steps - 1):
        told = stepper.decode()
        before.values()
        before = told
    before.values()


def decode(report: Report, roof: Roof, name: str, model: Any, *, tiny: bool) -> None:
    context, steps = (16, 2) if tiny else (1024, 16)
    ways = {"greedy": GREEDY, "sampled": DRAWN, "top-k, top-p, penalty": SHAPED}
    for batch in [2] if tiny else [1, 8, 64, 256]:
        for way, sampling in ways.items():
            if way != "greedy" and batch not in (2, 64):
                continue
            stepper = Stepper(
                model,
                rows=batch,
                room=context + 64,
                block_size=4 if tiny else BLOCK_SIZE,
                sampling=sampling,
            )
            # What the cache holds changes no time: it is all zeros.
            ids = [row[0] for row in prompts(model, batch, 1)]
            run = partial(_decode_steps, stepper, context, ids, steps)
            step_s = seconds(run, model.device) / steps
            shape = stepper.shape
            kv = (
                2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * next(model.parameters()).itemsize
            )
            floor_s = (weight_bytes(model) + batch * (context + steps // 2) * kv) / roof.bytes_per_s
            report.add(
                f"decode, {name}",
                f"batch {batch}, context {context}, {way}, {stepper.attention}",
                f"{batch / step_s:.0f} tokens/s, {step_s * 1e3:.2f} ms",
                f"{floor_s / step_s:.0%} of the bandwidth roofline",
            )
            del stepper, run
            make_room()


def choice(report: Report, name: str, model: Any, *, tiny: bool) -> None:
    """What choosing the tokens takes by itself, as the graph that it is."""
    for batch in [2] if tiny else [1, 64, 256]:
        for way, sampling in {"greedy": GREEDY, "sampled": DRAWN, "top-k, top-p, penalty": SHAPED}.items():
            stepper = Stepper(
                model, rows=batch, room=16 if tiny else 1024, block_size=4 if tiny else BLOCK_SIZE
            )
            choosing = [Choosing(sampling, 1, 9, range(1, 4)) for _ in range(batch)]
            run = partial(_choose, stepper, choosing)
            report.add(
                f"choice, {name}", f"batch {batch}, {way}", f"{seconds(run, model.device) * 1e6:.0f} us"
            )


def _choose(stepper: Stepper, choosing: list[Any]) -> None:
    stepper.decoder.choose(choosing).values()


def first_token(report: Report, name: str, model: Any, *, tiny: bool) -> None:
    """A prompt arrives among running streams and is computed in chunks beside their tokens."""
    streams, context, length, chunk = (1, 8, 9, 5) if tiny else (32, 1024, 2048, 512)
    stepper = Stepper(
        model,
        rows=streams + 1,
        room=max(context + 64, length + 8),
        block_size=4 if tiny else BLOCK_SIZE,
        budget=chunk + streams,
    )
    given = prompts(model, 1, length)[0]
    tokens = prompts(model, streams, 1)
    waits, gaps = [], []
    for _ in range(2 if tiny else 6):
        began = last = time.perf_counter()
        for step, begin in enumerate(range(0, length, chunk)):
            running = [(row, context + step, tokens[row]) for row in range(streams)]
            stepper.compute([*running, (streams, begin, given[begin : begin + chunk])]).values()
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
        waits.append(last - began)
    # The first arrival compiled the kernels.
    steps = -(-length // chunk)
    report.add(
        f"first token, {name}",
        f"{length} tokens in chunks of {chunk} among {streams} streams",
        f"{statistics.median(waits[1:]) * 1e3:.1f} ms",
        f"largest gap of a stream {max(gaps[steps:]) * 1e3:.1f} ms",
    )


def generate(
    model: Any, given: list[list[int]], new_tokens: int, *, budget: int, block_size: int
) -> Iterator[list[int]]:
    """A token of each at a time: greedy continuations of all prompts. The first is a warm-up's, for nothing."""
    rows, length = len(given), len(given[0])
    stepper = Stepper(model, rows=rows, room=length + new_tokens + 4, block_size=block_size, budget=budget)
    first = prefill(stepper, given, budget)
    stepper.start_decoding(length, first)
    stepper.decode().values()
    yield first
    first = prefill(stepper, given, budget)
    stepper.start_decoding(length, first)
    yield first
    before: Told | None = None
    for _ in range(new_tokens - 1):
        told = stepper.decode()
        if before is not None:
            yield before.values()
        before = told
    if before is not None:
        yield before.values()


def against_transformers(report: Report, name: str, model: Any) -> None:
    rows, length, new_tokens = 64, 256, 128
    given = prompts(model, rows, length)
    ours = generate(model, given, new_tokens, budget=4096, block_size=BLOCK_SIZE)
    next(ours)
    synchronize(model.device)
    began = time.perf_counter()
    assert sum(1 for _ in ours) == new_tokens
    synchronize(model.device)
    our_s = time.perf_counter() - began
    theirs_s = _continuous_batching(model, given, new_tokens)
    rate, their_rate = rows * new_tokens / our_s, rows * new_tokens / theirs_s
    report.add(
        f"generate, {name}",
        f"{rows} x ({length} + {new_tokens})",
        f"{rate:.0f} tokens/s",
        f"{rate / their_rate:.2f}x transformers' continuous batching ({their_rate:.0f})",
    )


def _continuous_batching(model: Any, given: list[list[int]], new_tokens: int) -> float:
    """Seconds, with the manager started and warm."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new_tokens)
    model.set_attn_implementation("sdpa")
    try:
        with model.continuous_batching_context_manager(
            generation_config=config, block=True, timeout=30
        ) as manager:
            times = []
            for _ in range(2):
                began = time.perf_counter()
                for prompt in given:
                    manager.add_request(prompt, max_new_tokens=new_tokens)
                done = 0
                while done < len(given):
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        done += 1
                    elif result is None and not manager.is_running():
                        raise RuntimeError("continuous batching stopped early")
                times.append(time.perf_counter() - began)
            return times[-1]
    finally:
        model.set_attn_implementation(interface.IMPLEMENTATION)
