"""The sampler that runs as a graph, against the reference and against the distribution that it must draw from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.engine.sampler import Sampler, _truncate
from engine_worker.protocol import SamplingParams
from engine_worker.runner.gpu_sampler import Choosing, Level, Settings, choose, pack
from engine_worker.runner.nucleus import floors

VOCAB, BLOCKS, BLOCK_SIZE = 50, 6, 4


@dataclass
class Row:
    """See engine_worker/engine/row.py."""

    sampling: SamplingParams
    token_ids: list[int]
    num_prompt: int
    stop_ids = frozenset[int]()
    bad_words = ()
    matcher = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt


def through_the_graph(logits, rows, size=None):
    """What `choose` gives for reference rows, padded to `size`, their tokens in a cache of shuffled blocks."""
    size = size or len(rows)
    tokens = torch.full((1 + BLOCKS * len(rows), BLOCK_SIZE), VOCAB - 1, dtype=torch.int32)
    choosing = []
    for at, row in enumerate(rows):
        blocks = [1 + at + len(rows) * n for n in range(BLOCKS)]
        held = torch.full((BLOCKS * BLOCK_SIZE,), VOCAB - 2, dtype=torch.int32)
        held[: len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int32)
        tokens[blocks] = held.view(BLOCKS, BLOCK_SIZE)
        changes = list(row.sampling.logit_bias.items())
        choosing.append(Choosing(row.sampling, row.num_prompt, len(row.token_ids), blocks, changes))
    level = max(one.level for one in choosing)
    flat = torch.from_numpy(pack(choosing, size, BLOCKS, VOCAB))
    padded = torch.full((size, VOCAB), torch.nan)
    padded[: len(rows)] = logits
    return choose(padded, Settings(flat, size, BLOCKS), tokens, level)[: len(rows)].tolist()


_sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 1e-38, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([1, 2, 7, 49, 50, 90]),
        "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.1, 1.7]),
        "presence_penalty": st.sampled_from([-0.3, 0.2]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
        "seed": st.integers(0, 2**63 - 1),
    },
).map(lambda fields: SamplingParams(max_tokens=9, **fields))


@given(
    st.lists(
        st.tuples(_sampling, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_it_chooses_what_the_reference_chooses_whatever_the_batch(asked, seed, more):
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [Row(sampling, tokens, num_prompt=1 + len(tokens) // 2) for sampling, tokens in asked]
    want = [one.token_id for one in Sampler(VOCAB).sample(logits, rows)]
    assert through_the_graph(logits, rows, len(rows) + more) == want
    alone = [through_the_graph(logits[[at]], [row])[0] for at, row in enumerate(rows)]
    assert alone == want


@given(
    st.integers(0, 10**6),
    st.integers(0, 60),
    st.floats(0.001, 1),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_floors_are_where_sorting_would_cut(seed, top_k, top_p, spread, ties):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        logits = logits.round()
    row = Row(SamplingParams(max_tokens=1, temperature=1.0, top_k=top_k, top_p=top_p), [1], num_prompt=1)
    floor = floors(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    kept = (logits >= floor[:, None])[0]
    # From the definition, ties kept.
    ordered = logits[0].sort(descending=True).values
    k = top_k if 0 < top_k < VOCAB else VOCAB
    left = torch.where(logits[0] >= ordered[k - 1], logits[0], -torch.inf).double().softmax(0)
    above = torch.tensor([left[logits[0] > value].sum() for value in logits[0]])
    inside = (left > 0) & ((above < top_p) | (above == 0))
    # Where rounding may decide either way nothing is promised.
    decided = (above - top_p).abs() > 1e-5
    assert torch.equal(kept[decided], inside[decided])
    if not ties:
        assert torch.equal(kept[decided], _truncate(logits, [row]).isfinite()[0][decided])


CRITICAL = 21.1
"""Of chi-square with three degrees of freedom: exceeded once in 10,000 right samples, and the seeds are fixed."""


def _chi_square(counts: torch.Tensor, shares: torch.Tensor) -> float:
    expected = shares.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_it_draws_from_the_distribution():
    """20,000 seeds; a wrong temperature or a nucleus that is one token too large is seen at once."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0])
    sampling = {"temperature": 0.8, "top_p": 0.96}
    n = 20_000
    choosing = [Choosing(SamplingParams(max_tokens=1, seed=seed, **sampling), 1, 1) for seed in range(n)]
    flat = torch.from_numpy(pack(choosing, n, 1, 6))
    chosen = choose(
        logits.expand(n, 6), Settings(flat, n, 1), torch.zeros(2, 4, dtype=torch.int32), Level.SHAPED
    )
    counts = torch.bincount(chosen, minlength=6)
    expected = (logits / 0.8).softmax(0)
    assert expected[:3].sum() < 0.96 < expected[:4].sum()
    assert counts[4:].sum() == 0
    assert _chi_square(counts[:4], (logits[:4] / 0.8).softmax(0)) < CRITICAL
    assert _chi_square(counts[:4], (logits[:4] / 0.9).softmax(0)) > CRITICAL, "the test would see it"


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_rows_without_a_finite_logit_say_so(level, bad):
    logits = torch.randn(3, VOCAB)
    logits[1, 4 if bad == torch.inf else slice(None)] = bad
    sampling = SamplingParams(max_tokens=1, temperature=0.7)
    flat = torch.from_numpy(pack([Choosing(sampling, 1, 1)] * 3, 3, 1, VOCAB))
    chosen = choose(logits, Settings(flat, 3, 1), torch.zeros(2, 4, dtype=torch.int32), level).tolist()
    assert chosen[1] == -1
    assert chosen[0] >= 0
    assert chosen[2] >= 0


def test_nothing_waits_for_the_device_and_no_shape_depends_on_data():
    """Meta tensors have shapes and no data: whatever asked for a value would fail on them."""
    flat = torch.from_numpy(pack([Choosing(SamplingParams(max_tokens=1), 1, 1)] * 2, 2, 3, VOCAB)).to("meta")
    logits = torch.zeros(2, VOCAB, device="meta")
    tokens = torch.zeros(7, 4, dtype=torch.int32, device="meta")
    for level in Level:
        chosen = choose(logits, Settings(flat, 2, 3), tokens, level)
        assert (chosen.shape, chosen.dtype) == ((2,), torch.int64)


def test_wide_numbers_lie_where_a_device_can_read_them():
    for rows in (1, 3, 7):
        settings_ = Settings(torch.from_numpy(pack([], rows, 5, VOCAB)), rows, 5)
        for name in ("noise", "frequency", "presence"):
            assert getattr(settings_, name).storage_offset() * 8 % 8 == 0
        assert np.array_equal(settings_.repetition.numpy(), np.ones(rows, np.float32))
