"""OpenVINO GenAI's continuous batching, weights in fp32 or int8, keys and values in float32.

In a virtual environment of its own, with `openvino-genai` and `optimum-intel[openvino]`, which
converts the weights once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat


def start(options: Options) -> Engine:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 3
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    pipe = openvino_genai.ContinuousBatchingPipeline(
        str(_converted(options)),
        scheduler,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        },
    )
    count = 0

    def run(chats: Sequence[Chat]) -> Run:
        nonlocal count
        began = time.perf_counter()
        handles = []
        for chat in chats:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = chat.output_tokens
            config.ignore_eos = True
            config.do_sample = False
            count += 1
            handles.append(
                pipe.add_request(count, openvino.Tensor(np.array([chat.prompt], dtype=np.int64)), config)
            )
        outputs: list[list[int]] = [[] for _ in chats]
        first = [0.0] * len(chats)
        finished = [0.0] * len(chats)
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter() - began
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        outputs[row] += output.generated_ids
                    first[row] = first[row] or now
                    finished[row] = now
        return Run(time.perf_counter() - began, outputs, finished, first)

    return run


def _converted(options: Options) -> Path:
    target = Path(options.cache_dir) / f"openvino-{options.precision}"
    if not (target / "openvino_model.xml").is_file():
        cli = Path(sys.executable).with_name("optimum-cli")
        subprocess.run(
            [
                *(str(cli), "export", "openvino", "--model", options.model_dir),
                *("--task", "text-generation-with-past", "--weight-format", options.precision, str(target)),
            ],
            check=True,
        )
    return target
