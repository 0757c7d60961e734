from __future__ import annotations

import os

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
@settings(max_examples=int(os.environ.get("WEIR_HISTORIES", "300")), deadline=None)
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


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "grow", "learn", "forget", "release"]),
        st.integers(0, 2),  # table
        st.integers(0, 1),  # what its blocks hold
        st.integers(1, 40),  # tokens
    ),
    min_size=8,
    max_size=60,
)


@given(_ACTIONS)
@settings(max_examples=int(os.environ.get("WEIR_HISTORIES", "300")), deadline=None)
def test_any_order_of_sharing_learning_and_forgetting_keeps_the_books(actions):
    """Whoever finds a key finds a block that holds what it says: also when cached ones are taken for others."""
    pool = BlockPool(12, 4)
    tables = [BlockTable() for _ in range(3)]
    kinds = [0] * 3
    holds: dict[int, bytes] = {}

    def keys(kind: int, count: int) -> list[bytes]:
        return [f"{kind}-{at}".encode() for at in range(count)]

    def release(which: int) -> None:
        pool.release(tables[which])

    def grow(which: int, tokens: int) -> None:
        table = tables[which]
        before = len(table.blocks)
        available = pool.available
        missing = max(0, pool.blocks_for(tokens) - before)
        assert pool.grow(table, tokens) == (missing <= available)
        new = table.blocks[before:]
        assert pool.available == available - len(new)
        written = keys(kinds[which], len(table.blocks))[before:]
        holds.update(zip(new, written, strict=True))

    for name, which, kind, tokens in actions:
        table = tables[which]
        if name == "begin":
            release(which)
            kinds[which] = kind
            found = pool.find(keys(kind, pool.blocks_for(tokens)))
            assert [holds[block] for block in found] == keys(kind, len(found))
            cost, available = pool.cost(tokens, found), pool.available
            if cost <= available:
                pool.share(table, found)
                grow(which, tokens)
                assert pool.available == available - cost
        elif name == "grow":
            grow(which, tokens)
        elif name == "learn":
            pool.learn(table, keys(kinds[which], len(table.blocks)))
        elif name == "forget":
            others = {block for other in tables if other is not table for block in other.blocks}
            assert set(pool.forget(table)) == set(table.blocks) - others
            known = {
                block
                for each in range(2)
                for at in range(10)
                for block in pool.find([f"{each}-{at}".encode()])
            }
            assert not known & set(table.blocks)
        else:
            release(which)
        pool.check(tables)
    for which in range(3):
        release(which)
    pool.check(tables)
    assert pool.available == pool.total
