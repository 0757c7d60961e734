"""The compiled products against torch's, at every tile height and on both sides of each switch."""

from __future__ import annotations

from functools import partial
from itertools import product as product_of

import numpy as np
import pytest
import torch
from numba import njit

from engine_worker.compiled import dot, product
from engine_worker.compiled.pointwise import exponentials, largest, silu_gate, turned
from engine_worker.compiled.product import DOT, gated, linear, pack, tiling
from engine_worker.compiled.tile import BYTE, FLOAT, HALF
from engine_worker.compiled.vector import LANES, MAX_ROWS, VECTORS, WIDTH

pytestmark = pytest.mark.skipif(WIDTH == 0, reason="no vector unit that is known")

KINDS = [
    FLOAT,
    HALF,
    BYTE,
    pytest.param(DOT, marks=pytest.mark.skipif(not dot.AVAILABLE, reason="no VNNI of AVX-512")),
]
# The last is more numbers than stay in the second-level cache at a depth of 101.
ROWS = [*range(1, MAX_ROWS + 2), 2 * MAX_ROWS + 1, 4 * MAX_ROWS, 12 * MAX_ROWS + 5, 170 * MAX_ROWS + 5]


def tiled(x):
    """[rows, depth] to [tiles][depth][rows of a tile]; rows of padding hold 7."""
    tiles, rows = tiling(len(x))
    padded = torch.full((tiles * rows, x.shape[1]), 7.0)
    padded[: len(x)] = x
    return padded.view(tiles, rows, -1).transpose(1, 2).contiguous(), tiles, rows


def operand(x, kind):
    """(activations as weights of a kind meet them, tiles, rows of each, what is left of `x` in them)."""
    a, tiles, rows = tiled(x)
    if kind != DOT:
        return a, tiles, rows, x
    depth = x.shape[1]
    padded = torch.zeros(len(x), dot.groups(depth) * dot.GROUP)
    padded[:, :depth] = x
    a = torch.full((tiles * product.tile_bytes(DOT, rows, depth),), 77, dtype=torch.uint8)
    for index, row in enumerate(padded):
        dot.quantise(row.data_ptr(), depth, a.data_ptr(), index, rows)
    of_group = padded.view(len(x), -1, dot.GROUP)
    peaks = of_group.abs().amax(dim=2, keepdim=True)
    return a, tiles, rows, ((of_group * (127 / peaks)).round() * (peaks / 127)).view(len(x), -1)[:, :depth]


def rounded(weight, kind):
    """What is left of a weight in its kind."""
    if kind in (BYTE, DOT):
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scales).round() * scales
    return weight.half().float() if kind == HALF else weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "depth"), [*((rows, 101) for rows in ROWS), (40, 2048), (50, 4099)])
@pytest.mark.parametrize("what", ["plain", "bias", "accumulate"])
def test_linear(rows, depth, kind, what):
    torch.manual_seed(rows)
    outputs = 3 * WIDTH + 5
    x, weight = (torch.randn(size, depth) * (101 / depth) ** 0.25 for size in (rows, outputs))
    bias = torch.randn(outputs)
    a, tiles, height, x = operand(x, kind)
    panels = pack(weight, kind)
    padded_bias = torch.zeros(len(panels) * WIDTH)
    padded_bias[:outputs] = bias
    before = torch.randn(tiles * height, len(panels) * WIDTH)
    y = before.clone()
    counter = np.zeros(1, np.int64)
    scratch = torch.zeros(product.scratch_floats(depth))
    # Two threads' parts, one after the other: the first takes every chunk but those it leaves.
    for _ in range(2):
        linear(
            counter.ctypes.data, 2, a.data_ptr(), tiles, height, depth, panels.data_ptr(), kind, len(panels),
            padded_bias.data_ptr() if what == "bias" else 0, y.data_ptr(), y.shape[1],
            what == "accumulate", scratch.data_ptr(),
        )  # fmt: skip
    want = x @ rounded(weight, kind).T
    want += {"plain": 0, "bias": bias, "accumulate": before[:rows, :outputs]}[what]
    torch.testing.assert_close(y[:rows, :outputs], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "depth", "gelu"),
    # The deep ones: real models' sizes, of which the second-level cache holds a panel or less.
    [*((rows, 101, False) for rows in ROWS), (ROWS[-1], 101, True), (40, 2048, False), (50, 4099, False)],
)
def test_gated(rows, depth, gelu, kind):
    torch.manual_seed(rows)
    inner = 2 * WIDTH + 3
    x, gate, up = (torch.randn(size, depth) * (101 / depth) ** 0.25 for size in (rows, inner, inner))
    a, tiles, height, x = operand(x, kind)
    panels = torch.stack((pack(gate, kind), pack(up, kind)), dim=1)
    lead = len(panels) * WIDTH + 3
    y = torch.zeros(tiles * height, lead) if kind == DOT else torch.zeros(tiles, len(panels) * WIDTH, height)
    counter = np.zeros(1, np.int64)
    scratch = torch.zeros(product.scratch_floats(depth))
    gated(
        counter.ctypes.data, 1, a.data_ptr(), tiles, height, depth, panels.data_ptr(), kind, len(panels),
        y.data_ptr(), lead, gelu, 0, 0, scratch.data_ptr(),
    )  # fmt: skip
    gate, up = rounded(gate, kind), rounded(up, kind)
    act = partial(torch.nn.functional.gelu, approximate="tanh") if gelu else torch.nn.functional.silu
    want = act(x @ gate.T) * (x @ up.T)
    got = y if kind == DOT else y.transpose(1, 2).reshape(tiles * height, -1)
    got = got[:rows, :inner]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4 if depth == 101 else 1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 30, 512])
def test_threads_get_the_same_to_do(rows, threads):
    depth, (tiles, height) = 1536, tiling(rows)
    for kind, beside, units in product_of((FLOAT, DOT), (1, 2), range(1, 120)):
        chunks, block, _ = product._portions(kind, units, beside, threads, tiles, height, depth)
        spans = [range(*product.chunk(number, chunks, units)) for number in range(chunks)]
        assert [unit for span in spans for unit in span] == list(range(units))
        shares = [sum(map(len, spans[thread::threads])) for thread in range(threads)]
        assert max(shares) - min(shares) <= 1
        assert block * beside <= max(beside, product.group_panels(kind, depth))


@njit
def _softmax_parts(row: int, vectors: int) -> tuple[float, float]:
    peak = largest(row, vectors)
    return peak, exponentials(row, peak, vectors)


def test_exponentials():
    row = torch.cat((torch.linspace(-100, 0, 16 * LANES - 2), torch.tensor([-float("inf"), 3.0])))
    want = torch.exp((row - 3).double())
    peak, total = _softmax_parts(row.data_ptr(), len(row) // LANES)
    assert peak == 3
    # Below e^-87 the result is 0, and no float32 sum with a 1 in it can tell.
    torch.testing.assert_close(row.double(), want, rtol=3e-7, atol=1e-37)
    assert total == pytest.approx(float(want.sum()), rel=1e-6)


@njit
def _gate(gate: int, up: int, rows: int, target: int, lead: int) -> None:
    silu_gate(gate, up, rows, VECTORS, target, lead)


def test_gate():
    rows, lead = 8, WIDTH + 3
    gate = torch.cat((torch.linspace(-100, 100, rows * WIDTH - 1), torch.tensor([torch.nan]))).view(
        rows, WIDTH
    )
    up, target = torch.randn(rows, WIDTH), torch.zeros(rows, lead)
    _gate(gate.data_ptr(), up.data_ptr(), rows, target.data_ptr(), lead)
    want = (torch.nn.functional.silu(gate.double()) * up).float()
    torch.testing.assert_close(target[:, :WIDTH], want, rtol=5e-7, atol=1e-35, equal_nan=True)
    assert target[:, WIDTH:].eq(0).all()


def test_nan_stays_nan():
    row = torch.zeros(LANES)
    row[1] = torch.nan
    _, total = _softmax_parts(row.data_ptr(), 1)
    assert np.isnan(total)


@njit
def _turned(source, lead, rows, columns, target):
    turned(source, lead, rows, columns, target)


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize("columns", [1, LANES, 2 * LANES, 3 * LANES + 5])
def test_rows_are_turned_and_nothing_behind_them_is_touched(rows, columns):
    lead = columns + 3
    source, target = torch.rand(rows * lead + LANES), torch.full((columns * rows + LANES,), 7.0)
    _turned(source.data_ptr(), lead, rows, columns, target.data_ptr())
    expected = source[: rows * lead].view(rows, lead)[:, :columns].T
    assert torch.equal(target[: columns * rows].view(columns, rows), expected)
    assert (target[columns * rows :] == 7).all()


def test_tiles_are_even():
    assert tiling(MAX_ROWS) == (1, MAX_ROWS)
    assert tiling(MAX_ROWS + 1) == (2, MAX_ROWS // 2 + 1)
    for rows in range(1, 300):
        tiles, height = tiling(rows)
        assert height <= MAX_ROWS
        assert rows <= tiles * height < rows + tiles


@pytest.mark.skipif(not dot.AVAILABLE, reason="no VNNI of AVX-512")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_survives_rounding(bad):
    """A poisoned request has to be found by its logits: bytes know no NaN, their scale does."""
    x, weight = torch.randn(2, dot.GROUP), torch.randn(WIDTH, dot.GROUP)
    x[1, 3] = bad
    a, tiles, rows, _ = operand(x, DOT)
    panels, y = pack(weight, DOT), torch.zeros(2, WIDTH)
    counter, scratch = np.zeros(1, np.int64), torch.zeros(product.scratch_floats(dot.GROUP))
    linear(
        counter.ctypes.data, 1, a.data_ptr(), tiles, rows, dot.GROUP, panels.data_ptr(), DOT, 1, 0,
        y.data_ptr(), WIDTH, False, scratch.data_ptr(),
    )  # fmt: skip
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.skipif(not dot.AVAILABLE, reason="no VNNI of AVX-512")
def test_a_row_of_zeros_stays_zero():
    x = torch.zeros(1, dot.GROUP)
    a, _, rows, _ = operand(x, DOT)
    panels, y = pack(torch.randn(WIDTH, dot.GROUP), DOT), torch.ones(1, WIDTH)
    counter, scratch = np.zeros(1, np.int64), torch.zeros(product.scratch_floats(dot.GROUP))
    linear(
        counter.ctypes.data, 1, a.data_ptr(), 1, rows, dot.GROUP, panels.data_ptr(), DOT, 1, 0,
        y.data_ptr(), WIDTH, False, scratch.data_ptr(),
    )  # fmt: skip
    assert not y.any()
