"""llama.cpp, weights in q4_0 or q8_0 or float32, keys and values in float32: as its server batches.

In a virtual environment of its own, with `llama-cpp-python`, which builds llama.cpp for this machine. Each
step takes one token of every running request and then as many prompt tokens as fit into a batch of 512,
which is what `llama-server --cont-batching` does; the most likely token is taken from the logits here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat

_BATCH: Final = 512
_SEQUENCES: Final = 64
_FILE_TYPES: Final = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """It tells hundreds of lines about each model."""


def start(options: Options) -> Engine:
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(_weights(options)).encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = _SEQUENCES * 640, _BATCH, _BATCH
    settings.n_seq_max, settings.kv_unified = _SEQUENCES, True
    settings.n_threads = settings.n_threads_batch = options.threads
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
    return lambda chats: _run(context, batch, vocab, chats)


def _run(context: Any, batch: Any, vocab: int, chats: Sequence[Chat]) -> Run:
    if len(chats) > _SEQUENCES:
        raise ValueError(f"{len(chats)} requests at once, {_SEQUENCES} at most")
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    began = time.perf_counter()
    outputs: list[list[int]] = [[] for _ in chats]
    first, finished = [0.0] * len(chats), [0.0] * len(chats)
    prompts, done = [0] * len(chats), 0
    """Prompt tokens computed so far, and requests at their end."""
    while done < len(chats):
        batch.n_tokens = 0
        sampled: list[tuple[int, int]] = []  # (row of the batch, request)
        for request, chat in enumerate(chats):
            if outputs[request] and len(outputs[request]) < chat.output_tokens:
                position = len(chat.prompt) + len(outputs[request]) - 1
                sampled.append((_add(batch, outputs[request][-1], position, request, True), request))
        for request, chat in enumerate(chats):
            while batch.n_tokens < _BATCH and prompts[request] < len(chat.prompt):
                at = prompts[request]
                is_last = at == len(chat.prompt) - 1
                row = _add(batch, chat.prompt[at], at, request, is_last)
                prompts[request] += 1
                if is_last:
                    sampled.append((row, request))
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for row, request in sampled:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocab,))
            outputs[request].append(int(logits.argmax()))
        now = time.perf_counter() - began
        for _, request in sampled:
            first[request] = first[request] or now
            if len(outputs[request]) == chats[request].output_tokens:
                finished[request] = now
                done += 1
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), request, -1, -1)
    return Run(time.perf_counter() - began, outputs, finished, first)


def _add(batch: Any, token: int, position: int, request: int, wants_logits: bool) -> int:
    """The row of the batch that it takes."""
    row = int(batch.n_tokens)
    batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
    batch.seq_id[row][0], batch.logits[row] = request, wants_logits
    batch.n_tokens += 1
    return row


def _weights(options: Options) -> Path:
    exact = Path(options.cache_dir) / "fp32.gguf"
    if options.precision == "fp32":
        return exact
    target = exact.with_name(f"{options.precision}.gguf")
    if not target.is_file():
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.nthread = _FILE_TYPES[options.precision], options.threads
        part = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(exact).encode(), str(part).encode(), ctypes.byref(how)) != 0:
            raise RuntimeError(f"llama.cpp made no {target.name}")
        part.rename(target)
    return target
