"""One entry point for both kinds of attention."""

from __future__ import annotations

from torch import Tensor

from engine_worker.attention.kernels.decode import decode_attention
from engine_worker.attention.kernels.prefill import prefill_attention


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode where every sequence brings exactly one token, prefill otherwise. Returns [num_tokens, heads, dim].

    See `prefill_attention` for the arguments. The choice looks at shapes and `max_query_len`, both known
    to the host: nothing waits for the device.
    """
    if out is not None and not out.is_contiguous():
        raise ValueError("out must be contiguous")
    if max_query_len == 1 and query.shape[0] == seq_lens.shape[0]:
        return decode_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            out=out,
        )
    return prefill_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        max_query_len=max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        out=out,
    )
