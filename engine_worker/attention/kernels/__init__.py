"""Attention over a paged KV cache, as Triton kernels behind pure functions on tensors.

Importable only where `triton` is: compiled on CUDA, or on CPU tensors with TRITON_INTERPRET=1 set
before this package is imported, which is how the tests prove the arithmetic without a GPU.

A cache is [num_blocks, block_size, num_kv_heads, head_dim]; a sequence's tokens lie in the blocks
that its row of the block table names, in order (PagedAttention, Kwon et al., 2023, arXiv 2309.06180).
What lies in blocks, or parts of blocks, outside a sequence is never read: NaN there changes nothing.
"""

try:
    import triton  # noqa: F401 - only whether it is there
except ImportError as error:
    raise ImportError(
        "the Triton attention kernels need the package 'triton' (Linux only; CUDA builds of torch bring it)"
    ) from error

from engine_worker.attention.kernels.decode import decode_attention
from engine_worker.attention.kernels.paged import paged_attention
from engine_worker.attention.kernels.prefill import prefill_attention
from engine_worker.attention.kernels.runtime import INTERPRETED
from engine_worker.attention.kernels.write import write_kv

__all__ = ["INTERPRETED", "decode_attention", "paged_attention", "prefill_attention", "write_kv"]
