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

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
CASES = [(AMPERE, 256, 2), (AMPERE, 96, 7), (HOPPER, 128, 4)]
"""Generation, head_dim, query heads of a KV head: the largest head, sizes that are no powers of two, and what
benchmarks/gpu.sh measures."""


def shared_memory(
    target: GPUTarget, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> int:
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
    return int(compile(source, target=target, options=options).metadata.shared)


def attention(target: GPUTarget, dim: int, group: int) -> dict[str, int]:
    caches = dict.fromkeys(("query", "keys", "values"), "*bf16")
    scalars = {"tables": "*i32", "lengths": "*i32", "scale": "fp32", "softcap": "fp32"}
    common = {
        "HEADS": 8 * group,
        "GROUP": group,
        "DIM": dim,
        "DIM_PADDED": padded(dim),
        "PAGE": 64,
        "HAS_SOFTCAP": True,
        "UPCAST": False,
    }
    tiles = prefill.Tiles.of(dim, torch.bfloat16)
    return {
        "decode": shared_memory(
            target,
            decode._decode,
            {**caches, **scalars, "out": "*fp32", "logs": "*fp32"},
            {
                **common,
                "ROWS": padded(group),
                "TILE": decode._tile(dim, torch.bfloat16),
                "SPLITS": 8,
                "WINDOW": 1024,
            },
            num_warps=4,
            num_stages=3,
        ),
        "prefill": shared_memory(
            target,
            prefill._prefill,
            {**caches, **scalars, "out": "*bf16", "starts": "*i32", "num_seqs": "i32"},
            {
                **common,
                "ROWS": tiles.rows,
                "QUERIES": tiles.rows // group,
                "SEQUENCES": 16,
                "TILE": tiles.tile,
                "WINDOW": 0,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        ),
    }


def others(dim: int = 128, heads: int = 32) -> dict[str, int]:
    return {
        "join": shared_memory(
            AMPERE,
            decode._join,
            {"out": "*bf16", "parts": "*fp32", "logs": "*fp32"},
            {"HEADS": heads, "DIM": dim, "DIM_PADDED": dim, "SPLITS": 8, "SPLITS_PADDED": 8},
        ),
        "write": shared_memory(
            AMPERE,
            write._write,
            {
                **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
                "slots": "*i32",
                "num_tokens": "i32",
            },
            {"HEADS": 8, "DIM": dim, "WIDTH": 8 * dim, "TOKENS": 4},
        ),
    }


def main() -> None:
    for name, size in others().items():
        print(name, size)
    for target, dim, group in CASES:
        for name, size in attention(target, dim, group).items():
            print(f"{name}-{target.arch}-{dim}x{group}", size)


if __name__ == "__main__":
    main()
