"""`transformers` generate on one padded batch, which lasts as long as its longest answer. float32."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.contestant import Engine, Options
from benchmarks.engine.measure import Run
from benchmarks.engine.workload import Chat


def start(options: Options) -> Engine:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(chats: Sequence[Chat]) -> Run:
        width = max(len(chat.prompt) for chat in chats)
        ids = torch.zeros(len(chats), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, chat in enumerate(chats):
            ids[row, width - len(chat.prompt) :] = torch.tensor(chat.prompt)
            mask[row, width - len(chat.prompt) :] = 1
        began = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(chat.output_tokens for chat in chats),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wall_s = time.perf_counter() - began
        outputs = [output[row, width : width + chat.output_tokens].tolist() for row, chat in enumerate(chats)]
        return Run(wall_s, outputs, [wall_s] * len(chats))

    return run
