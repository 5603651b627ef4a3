"""Noise, filters and penalties against plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaflash.kernels.sampling import (
    FilterParams,
    filter_logits,
    gumbel_noise,
    noise_keys,
    penalize,
)

VOCAB = 50


def hash32(x: int) -> int:
    """lowbias32, written out with Python's own integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def ids(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20), token=st.integers(0, 999))
def test_noise_is_the_stated_function_of_seed_position_and_token(
    seed: int, position: int, token: int
) -> None:
    keys = noise_keys(seed, position)
    uniform = ((hash32(hash32(token ^ keys[0]) ^ keys[1]) >> 1) + 0.5) / 2**31
    expected = -math.log(-math.log1p(-uniform))
    noise = gumbel_noise(torch.tensor([noise_keys(1, 1), keys]), ids(1000))
    assert noise[1, token].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_noise_of_a_row_does_not_depend_on_its_neighbours() -> None:
    keys = torch.tensor([noise_keys(3, position) for position in range(9)])
    alone = torch.cat([gumbel_noise(keys[i : i + 1], ids(VOCAB)) for i in range(9)])
    assert torch.equal(alone, gumbel_noise(keys, ids(VOCAB)))


def test_choices_follow_the_softmax() -> None:
    """Chi-square of 40,000 choices over eight tokens; 99.9 % quantile for 7 degrees is 24.3."""
    draws = 40_000
    logits = torch.linspace(-2, 1, 8)
    keys = torch.tensor([noise_keys(11, position) for position in range(draws)])
    counts = (logits + gumbel_noise(keys, ids(8))).argmax(-1).bincount(minlength=8)
    expected = logits.softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


def test_noise_is_independent_across_positions_and_seeds() -> None:
    keys = torch.tensor([noise_keys(s, p) for s in (0, 1) for p in (0, 1)])
    rows = gumbel_noise(keys, ids(20_000))
    correlation = torch.corrcoef(rows)
    off_diagonal = correlation - torch.eye(4)
    assert float(off_diagonal.abs().max()) < 0.03  # 4 standard errors of 20,000 pairs


def kept_by_hand(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Sort, cut at k, renormalise, cut at p; drop what is below min_p times the best."""
    order = sorted(range(len(row)), key=lambda token: -row[token])[:top_k]
    weights = [math.exp(row[token] - row[order[0]]) for token in order]
    kept: set[int] = set()
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if not kept or mass < top_p * sum(weights):
            kept.add(token)
        mass += weight
    return {token for token in kept if row[token] - row[order[0]] >= math.log(max(min_p, 1e-300))}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    top_k=st.sampled_from([1, 2, 7, VOCAB]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    candidates=st.sampled_from([4, 20, 1024]),
)
def test_filters_keep_what_a_sort_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, candidates: int
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    params = FilterParams(
        top_k=torch.tensor([top_k, VOCAB, 5]),
        top_p=torch.tensor([top_p, 1.0, 1.0]),
        min_p=torch.tensor([min_p, 0.0, 0.0]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaflash.kernels.sampling.TOP_CANDIDATES", candidates)
        kept = filter_logits(logits, params) > -math.inf
    assert set(kept[0].nonzero()[:, 0].tolist()) == kept_by_hand(
        logits[0].tolist(), top_k, top_p, min_p
    )
    assert bool(kept[1].all())
    assert int(kept[2].sum()) == 5


def test_a_row_is_filtered_alike_alone_and_in_a_batch() -> None:
    """On several threads and a real vocabulary, where reductions are split over the threads."""
    logits = torch.randn(40, 49152, generator=torch.Generator().manual_seed(0)) * 2
    vocab = torch.full((40,), 49152)
    params = FilterParams(vocab, torch.linspace(0.5, 0.999, 40), torch.zeros(40))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = filter_logits(logits, params)
        for row in range(40):
            one = slice(row, row + 1)
            alone = FilterParams(params.top_k[one], params.top_p[one], params.min_p[one])
            assert torch.equal(filter_logits(logits[one], alone)[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]])
    counts = torch.tensor([[2, 1, 0, 0]])
    in_prompt = torch.tensor([[False, False, True, False]])
    penalties = torch.tensor([[2.0, 0.5, 0.25]])  # repetition, presence, frequency
    expected = [[1.0 - 0.5 - 0.5, -4.0 - 0.5 - 0.25, 0.5, 3.0]]
    assert penalize(logits, counts, in_prompt, penalties).tolist() == expected


def test_neutral_penalties_change_nothing() -> None:
    logits: Tensor = torch.randn(2, VOCAB)
    counts = torch.randint(0, 3, (2, VOCAB))
    neutral = torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3)
    assert torch.equal(penalize(logits, counts, counts > 1, neutral), logits)
