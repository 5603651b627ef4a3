"""Length heads against their formulas, written out for one block at a time."""

import torch
from torch import Tensor, nn

from adaflash.engine.models.heads import NoHead, SurvivalHead, ThresholdHead

SIZE, INNER, BLOCK = 6, 5, 8


def randomized(head: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return head.state_dict()


def states(width: int = BLOCK) -> Tensor:
    """[3, width, SIZE]"""
    return torch.randn(3, width, SIZE, generator=torch.Generator().manual_seed(1))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def survived(conditional: Tensor) -> float:
    """Expected drafts accepted: each needs all before it."""
    chance, total = 1.0, 0.0
    for own in conditional.tolist():
        chance *= own
        total += chance
    return total


def test_the_published_head_is_its_formula() -> None:
    """arXiv 2607.19223: mean and last state, a bottleneck, one residual block, a sigmoid."""
    head = ThresholdHead(SIZE, INNER, BLOCK)
    w = randomized(head)
    for width in (BLOCK, 3, 2):
        ratio = head.estimate(states(width)).ratio
        for x, found in zip(states(width), ratio, strict=True):
            f = torch.cat((x.sum(dim=0) / width, x[width - 1]))
            z = silu(w["down.weight"] @ f + w["down.bias"])
            z = z + silu(w["res.0.weight"] @ z + w["res.0.bias"])
            expected = sigmoid(w["out.weight"] @ z + w["out.bias"])
            torch.testing.assert_close(found, expected[0])


def test_a_share_becomes_even_chances_with_the_same_mean() -> None:
    """Of a block without end: the drafts expected, and the newest known token, are the share."""
    head = ThresholdHead(SIZE, INNER, BLOCK)
    randomized(head)
    endless = states(width=2000)
    found = head.estimate(endless)
    assert found.conditional.shape == (3, 1999)
    for conditional, ratio in zip(found.conditional, found.ratio.tolist(), strict=True):
        assert len(set(conditional.tolist())) == 1
        assert abs(survived(conditional) - max(ratio * BLOCK - 1, 0)) < 1e-3
    assert (found.ratio > 1 / BLOCK).any(), "no draft is expected anywhere: nothing was compared"


def test_a_share_below_one_token_expects_no_draft() -> None:
    head = ThresholdHead(SIZE, INNER, BLOCK)
    randomized(head)
    head.out.bias.data.fill_(-50.0)
    assert (head.estimate(states()).conditional == 0).all()
    head.out.bias.data.fill_(50.0)
    whole = head.estimate(states()).conditional
    torch.testing.assert_close(whole, torch.full((3, BLOCK - 1), (BLOCK - 1) / BLOCK))


def test_the_survival_head_is_its_formula() -> None:
    """A chance for each draft from its own state, the block's mean and a bias by position."""
    head = SurvivalHead(SIZE, INNER, BLOCK)
    w = randomized(head)
    for width in (BLOCK, 3, 2):
        found = head.estimate(states(width))
        assert found.conditional.shape == (3, width - 1)
        for x, conditional, ratio in zip(
            states(width), found.conditional, found.ratio, strict=True
        ):
            mean = x.sum(dim=0) / width
            for place in range(1, width):
                z = silu(w["down.weight"] @ torch.cat((x[place], mean)) + w["down.bias"])
                logit = w["out.weight"][0] @ z + w["position_bias"][place - 1]
                torch.testing.assert_close(conditional[place - 1], sigmoid(logit))
            assert abs(ratio.item() * BLOCK - 1 - survived(conditional)) < 1e-5


def test_without_a_head_chances_are_even() -> None:
    found = NoHead(BLOCK).estimate(states(width=4))
    assert found.conditional.tolist() == [[0.5, 0.5, 0.5]] * 3
    assert found.ratio.tolist() == [(1 + 0.5 + 0.25 + 0.125) / BLOCK] * 3


def test_heads_compute_in_their_own_precision() -> None:
    """States come in the precision of the drafter; estimates are float32 all the same."""
    for head in (ThresholdHead(SIZE, INNER, BLOCK), SurvivalHead(SIZE, INNER, BLOCK)):
        randomized(head)
        coarse = states().bfloat16()
        found, exact = head.estimate(coarse), head.estimate(coarse.float())
        assert found.conditional.dtype == found.ratio.dtype == torch.float32
        assert torch.equal(found.conditional, exact.conditional)
        assert torch.equal(found.ratio, exact.ratio)
    assert NoHead(BLOCK).estimate(states().bfloat16()).ratio.dtype == torch.float32
