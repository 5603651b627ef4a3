"""Losses and labels, against numbers worked out by hand."""

import math

import pytest
import torch

from adaflash.training.losses import (
    cross_entropy,
    hazard_loss,
    mixed_loss,
    reach_chances,
    reached_places,
    reverse_kl,
)


def test_cross_entropy_of_each_row() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    found = cross_entropy(logits, torch.tensor([1, 1]))
    assert found.tolist() == pytest.approx([math.log(4 / 3), math.log(5.0)])


def test_reverse_kl_is_the_students_side() -> None:
    student = torch.tensor([[math.log(0.5), math.log(0.5)]])
    teacher = torch.tensor([[math.log(0.9), math.log(0.1)]])
    by_hand = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert reverse_kl(student, teacher).tolist() == pytest.approx([by_hand])
    assert reverse_kl(teacher, teacher).tolist() == pytest.approx([0.0], abs=1e-6)
    # Logits that differ by a constant are the same distribution.
    assert reverse_kl(student + 7, teacher - 3).tolist() == pytest.approx([by_hand], rel=1e-5)


def test_the_published_mix_clips_after_the_division() -> None:
    ce, kl = torch.tensor([1.0, 3.0]), torch.tensor([0.1, 5.0])
    # 0.8 * (1 + 3) / 2 + 0.2 * (min(0.05, 0.06) + min(2.5, 0.06))
    assert float(mixed_loss(ce, kl, share=0.2, clip=0.06)) == pytest.approx(1.6 + 0.2 * 0.11)
    assert float(mixed_loss(ce, kl, share=0.0, clip=0.06)) == pytest.approx(2.0)
    assert float(mixed_loss(ce[:0], kl[:0], share=0.2, clip=0.06)) == 0.0


def test_a_place_is_reached_behind_matches_alone() -> None:
    matches = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert reached_places(matches).tolist() == [
        [True, True, True, False],
        [True, False, False, False],
    ]


def test_the_hazard_counts_reached_and_seen_places_alone() -> None:
    """-sum log c over what was right, and -log(1 - c) at the first that was not."""
    chances = torch.tensor([[0.8, 0.6, 0.5, 0.9], [0.7, 0.4, 0.3, 0.2], [0.6, 0.5, 0.4, 0.3]])
    matches = torch.tensor(
        [
            [True, True, False, True],  # ends at the third
            [True, True, True, True],  # seen to the second only
            [False, True, True, True],  # ends at once
        ]
    )
    seen = torch.tensor([[True] * 4, [True, True, False, False], [True, True, True, True]])
    by_hand = -(
        math.log(0.8) + math.log(0.6) + math.log(0.5) + math.log(0.7) + math.log(0.4)
        + math.log(0.4)
    )  # fmt: skip
    found = hazard_loss(torch.logit(chances), matches, seen)
    assert float(found) == pytest.approx(by_hand / 3, rel=1e-5)


def test_places_are_trained_as_often_as_they_are_reached() -> None:
    survival = torch.tensor([[0.9, 0.5, 0.01]])
    found = reach_chances(survival, gamma=2.0, explore=0.3)
    # Before the first: certain. Before the third: 0.5. The floor at place 3 is 0.3 / e.
    assert found[0].tolist() == pytest.approx([1.0, 0.9, 0.5])
    low = reach_chances(torch.tensor([[0.01, 0.001, 0.0]]), gamma=2.0, explore=0.3)
    assert low[0].tolist() == pytest.approx([1.0, 0.3 * math.exp(-0.5), 0.3 * math.exp(-1.0)])
    assert (low.diff(dim=1) <= 0).all()
