"""Any packed batch at all, through the one entry point, against plain torch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_worker.attention.paging import assert_equal, expected, make_batch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from engine_worker.attention import kernels


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_batch(data):
    # A row without a query is a padded one: it has no context either.
    row = st.tuples(st.integers(0, 9), st.integers(0, 20)).map(lambda x: (x[0], sum(x) if x[0] else 0))
    lengths = data.draw(st.lists(row, max_size=3))
    if data.draw(st.booleans(), label="decode"):
        lengths = [(1, length) for _, length in lengths]
    kv_heads = data.draw(st.integers(1, 2))
    batch = make_batch(
        lengths,
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([8, 16, 24])),
        block_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        tail=data.draw(st.integers(0, 2)),
        seed=data.draw(st.integers(0, 99)),
    )
    options = {
        "sliding_window": data.draw(st.none() | st.integers(1, 12)),
        "softcap": data.draw(st.none() | st.floats(0.5, 30)),
    }
    out = kernels.paged_attention(*batch.inputs, max_query_len=batch.max_query_len, scale=0.3, **options)
    assert_equal(out, expected(batch, 0.3, **options))
