"""What `transformers`' `generate_batch` does inside, with a length for each request. float32."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat


def start(options: Options) -> Engine:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32).eval()

    def run(chats: Sequence[Chat]) -> Run:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Room for 64 requests of some 400 tokens: at 256 a block, and a batch as wide as ours.
        batching = ContinuousBatchingConfig(num_blocks=192, max_batch_tokens=512)
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=30
        ) as manager:
            began = time.perf_counter()
            names = [manager.add_request(chat.prompt, max_new_tokens=chat.output_tokens) for chat in chats]
            outputs: dict[str, list[int]] = {}
            finished: dict[str, float] = {}
            while len(outputs) < len(chats):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("transformers' continuous batching stopped early")
                elif result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
                    finished[result.request_id] = time.perf_counter() - began
            wall_s = time.perf_counter() - began
        return Run(wall_s, [outputs[name] for name in names], [finished[name] for name in names])

    return run
