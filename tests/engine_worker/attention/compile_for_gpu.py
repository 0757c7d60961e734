"""Compiles every kernel for a GPU that need not be there: `python -m tests.engine_worker.attention.compile_for_gpu`.

The interpreter forgives what the compiler refuses (types of globals, of loop variables), and knows no
shared memory. Prints a line per kernel: name, bytes of shared memory per program.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from engine_worker.attention.kernels import decode, prefill, write
from engine_worker.attention.kernels.runtime import padded

AMPERE = GPUTarget("cuda", 80, 32)
DIM, GROUP = 128, 4


def shared_memory(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> int:
    """What is neither in `types` nor in `constants` is a stride."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name not in types
    }
    aligned = {at: value for at, value in aligned.items() if kernel.arg_names[at[0]] not in constants}
    source = ASTSource(kernel, signature, constants, aligned)
    return int(compile(source, target=AMPERE, options=options).metadata.shared)


def main() -> None:
    caches = dict.fromkeys(("query", "keys", "values"), "*bf16")
    scalars = {"tables": "*i32", "lengths": "*i32", "scale": "fp32", "softcap": "fp32"}
    common = {
        "HEADS": 8 * GROUP,
        "GROUP": GROUP,
        "DIM": DIM,
        "DIM_PADDED": DIM,
        "PAGE": 64,
        "HAS_SOFTCAP": True,
        "UPCAST": False,
    }
    tiles = prefill.Tiles.of(DIM, torch.bfloat16)
    results = {
        "decode": shared_memory(
            decode._decode,
            {**caches, **scalars, "out": "*fp32", "logs": "*fp32"},
            {
                **common,
                "ROWS": padded(GROUP),
                "TILE": decode._tile(DIM, torch.bfloat16),
                "SPLITS": 8,
                "WINDOW": 1024,
            },
            num_warps=4,
            num_stages=3,
        ),
        "join": shared_memory(
            decode._join,
            {"out": "*bf16", "parts": "*fp32", "logs": "*fp32"},
            {"HEADS": 8 * GROUP, "DIM": DIM, "DIM_PADDED": DIM, "SPLITS": 8, "SPLITS_PADDED": 8},
        ),
        "prefill": shared_memory(
            prefill._prefill,
            {**caches, **scalars, "out": "*bf16", "starts": "*i32", "num_seqs": "i32"},
            {
                **common,
                "ROWS": tiles.rows,
                "QUERIES": tiles.rows // GROUP,
                "SEQUENCES": 8,
                "TILE": tiles.tile,
                "WINDOW": 0,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        ),
        "write": shared_memory(
            write._write,
            {
                **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
                "slots": "*i64",
                "num_tokens": "i32",
            },
            {"HEADS": 8, "DIM": DIM, "WIDTH": 8 * DIM, "TOKENS": 4},
        ),
    }
    for name, size in results.items():
        print(name, size)


if __name__ == "__main__":
    main()
