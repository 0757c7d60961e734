"""Distributions, truncation and penalties against plain definitions of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_worker.engine.noise import philox, uniform
from engine_worker.engine.sampler import Sampler
from engine_worker.engine.sequence import Sequence
from tests.engine_worker.driving import request
from tests.engine_worker.engine.test_scheduler import sequence

VOCAB = 40


def row(output: int = 0, stop_ids: frozenset[int] = frozenset(), prompt: int = 2, **sampling) -> Sequence:
    """A sequence with `output` tokens, all 1, and the given sampling parameters."""
    made = sequence(1, prompt, max_tokens=10_000)
    made.request = request("r", [1] * prompt, 10_000, **sampling)
    made.token_ids += [1] * output
    made.stop_ids = stop_ids
    return made


def logits(rows: int = 1, width: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2


def ids(sampled) -> list[int | None]:
    return [item.token_id for item in sampled]


def frequencies(given: torch.Tensor, draws: int = 4000, **sampling) -> torch.Tensor:
    """How often each token is drawn from one row of logits, over many positions."""
    rows = [row(i, **sampling) for i in range(draws)]
    drawn = ids(Sampler(VOCAB).sample(given.expand(draws, -1), rows))
    return torch.bincount(torch.tensor(drawn), minlength=VOCAB) / draws


def test_philox_gives_the_published_numbers():
    # Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10).
    ones = np.full((1, 4), 0xFFFFFFFF, np.uint64)
    zeros = np.zeros((1, 4), np.uint64)
    assert philox(zeros, zeros[:, :2])[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(ones, ones[:, :2])[0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniform_depends_on_seed_and_position_alone():
    together = uniform([7, 8, -1], [0, 1, 2])
    assert [uniform([s], [p])[0] for s, p in ((7, 0), (8, 1), (-1, 2))] == together.tolist()
    assert len({*uniform([3] * 1000, range(1000))}) == 1000
    assert abs(uniform([3] * 10_000, range(10_000)).mean() - 0.5) < 0.02


def test_greedy_takes_the_first_of_the_largest():
    given = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert ids(Sampler(4).sample(given, [row()])) == [1]


def test_a_plain_batch_is_not_copied():
    given = logits(3)
    before = given.clone()
    Sampler(VOCAB).sample(given, [row(), row(temperature=1.0), row(frequency_penalty=1.0, output=3)])
    assert torch.equal(given, before)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-46, 1e-300])
def test_a_tiny_temperature_takes_the_largest(temperature):
    given = logits(4) * 1000
    rows = [row(i, temperature=temperature, top_p=0.9) for i in range(4)]
    assert ids(Sampler(VOCAB).sample(given, rows)) == given.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_from_the_softmax(temperature):
    given = logits()
    expected = (given[0] / temperature).softmax(-1)
    assert (frequencies(given, temperature=temperature) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.8},
        {"top_k": 8, "top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
        {"top_p": 1e-9},
    ],
    ids=str,
)
def test_truncation_against_its_definition(sampling):
    given = logits(seed=3)
    probabilities = given[0].softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[: sampling.get("top_k", VOCAB)]
    shares = probabilities[kept] / probabilities[kept].sum()
    kept = kept[shares.cumsum(0) - shares < sampling.get("top_p", 1.0)]
    kept = kept[probabilities[kept] >= sampling.get("min_p", 0.0) * probabilities.max()]
    expected = torch.zeros(VOCAB)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    found = frequencies(given, temperature=1.0, **sampling)
    assert set(found.nonzero().flatten().tolist()) <= set(kept.tolist())
    assert (found - expected).abs().max() < 0.03


def test_top_p_of_a_flat_distribution_needs_more_than_the_candidates():
    flat = torch.zeros(1, 5000)
    flat[0, :2500] = 1e-3
    rows = [row(i, temperature=1.0, top_p=0.4) for i in range(500)]
    drawn = ids(Sampler(5000).sample(flat.expand(500, -1), rows))
    assert max(drawn) < 2500
    # 40 % of the mass, not just what 512 candidates hold (ties with the last one are kept).
    assert len(set(drawn)) > 400


def test_rows_of_a_mix_are_what_they_are_alone():
    given = logits(6, seed=9)
    rows = [
        row(),
        row(3, temperature=1.0, seed=5),
        row(4, temperature=0.7, top_p=0.5, seed=6),
        row(2, temperature=1.0, top_k=3, seed=7, repetition_penalty=1.5),
        row(5, temperature=1.3, min_p=0.1, seed=8, presence_penalty=1.0),
        row(1, logit_bias={3: 100.0}),
    ]
    sampler = Sampler(VOCAB)
    alone = [ids(sampler.sample(given[i : i + 1], [item]))[0] for i, item in enumerate(rows)]
    assert ids(sampler.sample(given, rows)) == alone
    assert alone[5] == 3


def test_penalties_against_their_definition():
    # Prompt tokens 1, 1; output 1, 1, 1. Logits: 1 leads 2, and 0 is negative.
    given = torch.tensor([[-1.0, 4.0, 3.5, 0.0]])
    sampler = Sampler(4)
    assert ids(sampler.sample(given, [row(3)])) == [1]
    assert ids(sampler.sample(given, [row(3, frequency_penalty=0.2)])) == [2]  # 4 - 3 * 0.2 = 3.4
    assert ids(sampler.sample(given, [row(3, frequency_penalty=0.1)])) == [1]  # 3.7
    assert ids(sampler.sample(given, [row(3, presence_penalty=0.6)])) == [2]
    assert ids(sampler.sample(given, [row(0, presence_penalty=0.6)])) == [1]  # the prompt does not count
    assert ids(sampler.sample(given, [row(0, repetition_penalty=1.2)])) == [2]  # here it does
    negative = torch.tensor([[-3.0, -1.0, -1.1, -9.0]])
    assert ids(sampler.sample(negative, [row(0, repetition_penalty=1.2)])) == [2]


def test_fault_12_all_stop_ids_wait_for_min_tokens():
    given = torch.tensor([[9.0, 1.0, 8.0, 7.0]])
    both = frozenset({0, 2})
    assert ids(Sampler(4).sample(given, [row(2, both, min_tokens=3)])) == [3]
    assert ids(Sampler(4).sample(given, [row(3, both, min_tokens=3)])) == [0]


def test_fault_14_padded_ids_are_never_sampled():
    given = logits(1, VOCAB + 24)
    given[:, VOCAB:] = 100.0
    rows = [row(), row(temperature=5.0, logprobs=5)]
    sampled = Sampler(VOCAB).sample(given.expand(2, -1), rows)
    assert all(token < VOCAB for token in ids(sampled))
    assert all(entry.token_id < VOCAB for entry in sampled[1].logprobs.top)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_fault_29_logprobs_are_the_models_own(temperature):
    given = logits(2, seed=4)
    expected = given[1].log_softmax(-1)
    rows = [row(), row(2, temperature=temperature, logprobs=3, presence_penalty=1.0, logit_bias={2: 5.0})]
    plain, reported = Sampler(VOCAB).sample(given, rows)
    assert plain.logprobs is None
    chosen = reported.logprobs.chosen
    assert chosen.token_id == reported.token_id
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id]), abs=1e-5)
    best = expected.topk(3)
    assert [entry.token_id for entry in reported.logprobs.top] == best.indices.tolist()
    assert [entry.logprob for entry in reported.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_row_without_a_finite_logit_is_reported_and_no_other_suffers():
    given = logits(3)
    given[1, 5] = torch.nan
    sampled = ids(Sampler(VOCAB).sample(given, [row(), row(temperature=1.0), row(temperature=1.0)]))
    assert sampled[1] is None
    assert None not in (sampled[0], sampled[2])
