"""Calibration: outcomes of verified drafts correct the head, position by position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adaflash.engine.speculation.calibration import (
    PRIOR_VARIANCE,
    WINDOW,
    Calibration,
    Floats,
    Ints,
    logit,
    sigmoid,
)

TRUTH = np.array([0.9, 0.85, 0.9, 0.8])
NUM_DRAFTS = len(TRUTH)


def learn(
    calibration: Calibration,
    rng: np.random.Generator,
    truth: Floats,
    opinion: Floats,
    lengths: Ints | None = None,
) -> None:
    """One step of as many blocks as `truth` has rows; lengths: all whole, if not given."""
    right = np.cumprod(rng.random(truth.shape) < truth, axis=1).sum(axis=1)
    if lengths is None:
        lengths = np.full(len(truth), truth.shape[1])
    calibration.learn(opinion, lengths, np.minimum(right, lengths))


def shifted(chances: Floats, shift: Floats | float) -> Floats:
    return sigmoid(logit(chances) + shift)


def blocks(rng: np.random.Generator, count: int = 8) -> Floats:
    """Chances that differ between blocks, around TRUTH."""
    return shifted(np.tile(TRUTH, (count, 1)), rng.normal(0, 1, (count, 1)))


@pytest.mark.parametrize("shift", [[2.0, -1.5, 1.0, -2.0], [-3.0, -3.0, 3.0, 3.0]])
def test_it_finds_the_head_s_error_at_every_position(shift: list[float]) -> None:
    rng, calibration = np.random.default_rng(0), Calibration(NUM_DRAFTS)
    errors = []
    for step in range(200):
        truth = blocks(rng)
        opinion = shifted(truth, -np.array(shift))
        if step >= 100:
            errors.append(calibration.survival(opinion) - np.cumprod(truth, axis=1))
        learn(calibration, rng, truth, opinion)
    assert np.abs(np.concatenate(errors).mean(axis=0)).max() < 0.03
    assert calibration.shift == pytest.approx(np.array(shift), abs=0.6)


def test_a_head_that_is_right_is_left_alone() -> None:
    rng, calibration = np.random.default_rng(1), Calibration(NUM_DRAFTS)
    for _ in range(200):
        truth = blocks(rng)
        learn(calibration, rng, truth, truth)
    assert np.abs(calibration.shift).max() < 0.4


@pytest.mark.parametrize("shift", [-1.5, 0.0, 1.5])
def test_lengths_chosen_by_the_head_s_opinion_do_not_bias_it(shift: float) -> None:
    """Only drafts that look good are verified: labels are censored by what the head thinks."""
    rng, calibration = np.random.default_rng(2), Calibration(NUM_DRAFTS)
    found = []
    for step in range(400):
        truth = blocks(rng)
        opinion = shifted(truth, -shift)
        lengths = (calibration.survival(opinion) > 0.5).sum(axis=1)
        lengths[0] = NUM_DRAFTS if step % 16 == 0 else lengths[0]
        learn(calibration, rng, truth, opinion, lengths)
        found.append(calibration.shift)
    assert np.mean(found[200:], axis=0) == pytest.approx(shift, abs=0.35)


def test_outcomes_count_where_the_target_got_to() -> None:
    """Verified two of four; the first was right and the second wrong."""
    calibration = Calibration(4)
    calibration.learn(np.full((1, 4), 0.5), np.array([2]), np.array([1]))
    first, second, third, fourth = calibration.shift
    assert (first > 0, second < 0, third, fourth) == (True, True, 0, 0)


def test_behind_a_wrong_draft_nothing_is_learnt() -> None:
    calibration = Calibration(3)
    calibration.learn(np.full((1, 3), 0.5), np.array([3]), np.array([0]))
    assert calibration.shift[0] < 0
    assert calibration.shift[1:].tolist() == [0, 0]


def test_unverified_blocks_teach_nothing() -> None:
    calibration = Calibration(3)
    calibration.learn(np.full((2, 3), 0.5), np.array([0, 0]), np.array([0, 0]))
    assert calibration.shift.tolist() == [0, 0, 0]


def test_the_shift_is_the_most_likely_one() -> None:
    """Against a grid of the posterior: a normal prior, and one Bernoulli outcome each."""
    rng, calibration = np.random.default_rng(3), Calibration(1)
    opinion, accepted = rng.random((40, 1)), rng.integers(0, 2, 40)
    calibration.learn(opinion, np.ones(40, dtype=np.int64), accepted)
    grid = np.linspace(-4, 4, 8001)
    chance = sigmoid(logit(opinion) + grid)  # [40, grid]
    posterior = np.where(accepted[:, None], np.log(chance), np.log(1 - chance)).sum(axis=0)
    posterior -= grid**2 / (2 * PRIOR_VARIANCE)
    assert calibration.shift[0] == pytest.approx(grid[posterior.argmax()], abs=2e-3)


@pytest.mark.parametrize(("accepted", "opinion"), [(4, 0.01), (4, 0.999), (0, 0.99), (0, 0.001)])
def test_all_right_and_all_wrong_stay_finite_and_become_likely(
    accepted: int, opinion: float
) -> None:
    calibration = Calibration(4)
    conditional = np.full((8, 4), opinion)
    for _ in range(100):
        calibration.learn(conditional, np.full(8, 4), np.full(8, accepted))
    first = calibration.survival(conditional)[0, 0]
    assert np.isfinite(calibration.shift).all()
    assert 0 < first < 1
    assert abs(first - (accepted > 0)) < 0.05


@given(
    arrays(np.float64, (3, 5), elements=st.floats(0, 1)),
    arrays(np.float64, 5, elements=st.floats(-20, 20)),
)
def test_survival_never_rises_along_a_block(conditional: Floats, shift: Floats) -> None:
    calibration = Calibration(5)
    calibration.shift = shift
    survival = calibration.survival(conditional)
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()


def test_without_outcomes_it_says_what_the_head_says() -> None:
    conditional = np.array([[0.9, 0.5, 0.2]])
    expected = np.array([[0.9, 0.45, 0.09]])
    assert Calibration(15).survival(conditional) == pytest.approx(expected)


def test_blocks_may_be_narrower_than_the_widest() -> None:
    calibration = Calibration(15)
    calibration.learn(np.full((8, 3), 0.5), np.full(8, 3), np.full(8, 3))
    assert (calibration.shift[:3] > 1).all()
    assert (calibration.shift[3:] == 0).all()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    calibration = Calibration(1)
    opinion = np.full((8, 1), 0.5)
    for _ in range(100):
        calibration.learn(opinion, np.ones(8, dtype=np.int64), np.zeros(8, dtype=np.int64))
    assert calibration.shift[0] < -4
    for _ in range(WINDOW // 8):
        calibration.learn(opinion, np.ones(8, dtype=np.int64), np.ones(8, dtype=np.int64))
    afresh = Calibration(1)
    for _ in range(WINDOW // 8):
        afresh.learn(opinion, np.ones(8, dtype=np.int64), np.ones(8, dtype=np.int64))
    assert calibration.shift == pytest.approx(afresh.shift, abs=0.3)


def test_a_step_may_show_more_than_the_window_holds() -> None:
    """The newest count: here those of the last rows."""
    count = WINDOW + 44
    calibration = Calibration(1)
    accepted = np.r_[np.zeros(44, dtype=np.int64), np.ones(WINDOW, dtype=np.int64)]
    for _ in range(5):
        calibration.learn(np.full((count, 1), 0.5), np.ones(count, dtype=np.int64), accepted)
    assert calibration.shift[0] > 4


def test_a_drafter_without_drafts_needs_no_calibration() -> None:
    assert Calibration(0).survival(np.zeros((2, 0))).shape == (2, 0)
