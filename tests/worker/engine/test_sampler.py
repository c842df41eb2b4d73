"""Sampled frequencies follow the distribution, the pseudo-token's inside included; the key alone decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from torch import Tensor

from rookery.worker.engine import sampler
from rookery.worker.engine.native import kernels
from rookery.worker.engine.sampler import NEAR_NATS, SampledTokens, SamplingKey

SEEDS = 40_000

Sampler = Callable[[Tensor, Sequence[SamplingKey]], SampledTokens]


@pytest.fixture(scope="module", params=["torch", "kernel"])
def sample(request: pytest.FixtureRequest) -> Sampler:
    """By PyTorch's operations, and by one kernel."""
    if request.param == "torch":
        return sampler.sample
    if not kernels.load(None):
        pytest.skip(kernels.runtime.why_unavailable())
    from rookery.worker.engine.native.kernels.sampler import sample

    return sample


def frequencies(sample: Sampler, logits: Tensor, temperature: float) -> np.ndarray:
    counts = np.zeros(logits.shape[-1])
    for begin in range(0, SEEDS, 4000):
        draws = [SamplingKey(seed, 0, temperature) for seed in range(begin, begin + 4000)]
        tokens = sample(logits.expand(len(draws), -1), draws).tokens
        counts += np.bincount(tokens, minlength=len(counts))
    return counts


def chi_square_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """Wilson and Hilferty's normal approximation of the chi-square statistic; rare cells are pooled."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    pool = int(np.searchsorted(expected.cumsum(), 10)) + 1
    counts = np.concatenate(([counts[:pool].sum()], counts[pool:]))
    expected = np.concatenate(([expected[:pool].sum()], expected[pool:]))
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_distribution(sample: Sampler, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(60) * 3
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * SEEDS
    assert abs(chi_square_z(frequencies(sample, logits, temperature), expected)) < 4


def test_the_pseudo_token_holds_its_share_inside_and_out(sample: Sampler) -> None:
    torch.manual_seed(1)
    # a few near tokens, and four thousand far ones with about a third of the mass between them
    logits = torch.cat((torch.tensor([9.0, 6.0, 5.5]), torch.randn(4000) * 0.7 - NEAR_NATS + 8))
    p = torch.softmax(logits.double(), -1).numpy()
    far = np.nonzero((logits - logits.max()).numpy() < -NEAR_NATS)[0]
    assert 0.2 < p[far].sum() < 0.8
    counts = frequencies(sample, logits, 1.0)
    share = counts[far].sum() / SEEDS
    assert abs(share - p[far].sum()) < 4 * math.sqrt(p[far].sum() * (1 - p[far].sum()) / SEEDS)
    # inside, by tens of tokens sorted by probability, so that every cell is filled
    cells = np.array_split(far[np.argsort(p[far])], 40)
    inside, expected = (np.array([x[cell].sum() for cell in cells]) for x in (counts, p))
    assert abs(chi_square_z(inside, expected / expected.sum() * inside.sum())) < 4
    assert abs(chi_square_z(counts, p * SEEDS)) < 4


def test_positions_are_independent_of_each_other(sample: Sampler) -> None:
    logits = torch.zeros(1, 6)
    counts = np.zeros((6, 6))
    for begin in range(0, 9000, 1000):
        keys = [SamplingKey(seed, position, 1.0) for seed in range(begin, begin + 1000) for position in (3, 4)]
        tokens = np.array(sample(logits.expand(len(keys), -1), keys).tokens).reshape(-1, 2)
        np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    assert abs(chi_square_z(counts.reshape(-1), np.full(36, 250.0))) < 4


@settings(max_examples=examples(50))
@given(st.integers(0, 2**63 - 1), st.integers(0, 100_000), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(1, 9))
def test_other_rows_change_nothing_and_logprobs_are_those_sampled_from(
    sample: Sampler, seed: int, position: int, temperature: float, rows: int
) -> None:
    torch.manual_seed(position)
    logits = (torch.randn(rows, 3000) * 4).bfloat16()
    draws = [SamplingKey(seed + i, position, temperature) for i in range(rows)]
    together = sample(logits, draws)
    for i in range(rows):
        alone = sample(logits[i : i + 1], draws[i : i + 1])
        assert (together.tokens[i], together.logprobs[i]) == (alone.tokens[0], alone.logprobs[0])
        exact = torch.log_softmax(logits[i].double() / (temperature or 1.0), -1)
        assert together.logprobs[i] == pytest.approx(exact[together.tokens[i]].item(), abs=2e-5)
        if temperature == 0:
            assert logits[i, together.tokens[i]] == logits[i].max()


def test_a_small_difference_in_logits_seldom_changes_the_token(sample: Sampler) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4000, 2000) * 2
    draws = [SamplingKey(seed, 0, 1.0) for seed in range(4000)]
    moved = sample(logits + torch.randn_like(logits) * 0.02, draws).tokens
    flips = sum(a != b for a, b in zip(sample(logits, draws).tokens, moved, strict=True)) / 4000
    assert flips < 0.03


def test_a_row_with_nan_fails_alone(sample: Sampler) -> None:
    logits = torch.randn(3, 100)
    draws = [SamplingKey(seed, 0, 1.0) for seed in range(3)]
    good = sample(logits, draws)
    logits[1, 7] = torch.nan
    bad = sample(logits, draws)
    assert math.isnan(bad.logprobs[1])
    assert (bad.tokens[0], bad.tokens[2], bad.logprobs[0], bad.logprobs[2]) == (
        good.tokens[0],
        good.tokens[2],
        good.logprobs[0],
        good.logprobs[2],
    )


@settings(max_examples=examples(30))
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.floats(0.5, 6.0),
    st.integers(20, 3000),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_kernel_samples_the_same_tokens(
    seed: int, temperature: float, spread: float, vocabulary: int, dtype: torch.dtype
) -> None:
    if not kernels.load(None):
        pytest.skip(kernels.runtime.why_unavailable())
    from rookery.worker.engine.native.kernels.sampler import sample

    torch.manual_seed(seed % 1000)
    logits = (torch.randn(9, vocabulary) * spread).to(dtype)
    draws = [SamplingKey(seed + i, i, temperature) for i in range(8)]  # the ninth row is padding
    found, expected = sample(logits, draws), sampler.sample(logits.clone(), draws)
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
