from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.engine.block_pool import BlockPool, BlockTable


def test_scratch_block_is_never_handed_out():
    pool = BlockPool(5, 4)
    table = BlockTable()
    assert pool.grow(table, 16)
    assert sorted(table.blocks) == [1, 2, 3, 4]
    assert (pool.free, pool.used, pool.total) == (0, 4, 4)


def test_too_large_changes_nothing():
    pool = BlockPool(5, 4)
    table = BlockTable()
    assert pool.grow(table, 5)
    assert not pool.grow(table, 17)
    assert len(table.blocks) == 2
    pool.check([table])


def test_fault_24_release_is_idempotent():
    pool = BlockPool(9, 4)
    first, second = BlockTable(), BlockTable()
    pool.grow(first, 8)
    pool.release(first)
    pool.release(first)
    pool.grow(second, 8)
    pool.release(first)
    pool.check([second])
    assert pool.used == 2


def test_check_sees_a_lost_block():
    pool = BlockPool(9, 4)
    table = BlockTable()
    pool.grow(table, 8)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    table.blocks.append(table.blocks[0])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([table])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_order_of_growing_and_releasing_keeps_the_books(actions):
    """Each action is (table, tokens to hold); 0 tokens releases."""
    pool = BlockPool(20, 4)
    tables = [BlockTable() for _ in range(5)]
    for which, tokens in actions:
        table = tables[which]
        before = list(table.blocks)
        if tokens == 0:
            pool.release(table)
        elif not pool.grow(table, tokens):
            assert table.blocks == before
        else:
            assert len(table.blocks) == max(len(before), -(-tokens // 4))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.free == pool.total
