"""What training minimises. Shapes: N rows of logits; B blocks with K = W - 1 places."""

import torch
from torch import Tensor
from torch.nn import functional


def reach_chances(survival: Tensor, gamma: float, explore: float) -> Tensor:
    """How likely each place is to be trained, [B, K], falling along K, 1 at the first.

    survival: [B, K], the drafter's own, detached. A draft matters only if all before it were right,
    so a place is trained as often as the drafter gets there, S_{k-1}; but no more seldom than
    explore * exp(-(k - 1) / gamma), so that it can learn to get there.
    """
    before = torch.cat((torch.ones_like(survival[:, :1]), survival[:, :-1]), dim=1)
    place = torch.arange(survival.shape[1], device=survival.device)
    least = explore * torch.exp(-place / gamma)
    chances = torch.maximum(before, least)
    chances[:, 0] = 1.0
    return chances


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[N], against the teacher's most likely token. logits: [N, V]; labels: [N], columns."""
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def reverse_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(student || teacher) over the draft vocabulary, [N], at temperature 1."""
    student = logits.float().log_softmax(dim=-1)
    teacher = teacher_logits.float().log_softmax(dim=-1)
    return (student.exp() * (student - teacher)).sum(dim=-1)


def mixed_loss(ce: Tensor, kl: Tensor, share: float, clip: float) -> Tensor:
    """(1 - share) * mean CE + share * sum min(KL / W, clip), W the sum of the N weights, all 1.

    The published mix (arXiv 2607.19223) with its clip, which acts after the division.
    """
    total = max(1, len(ce))
    return (1 - share) * ce.sum() / total + share * (kl / total).clamp(max=clip).sum()


def hazard_loss(logits: Tensor, matches: Tensor, seen: Tensor) -> Tensor:
    """Negative log-likelihood of where blocks end, per block.

    logits: [B, K], of P(place k right | all before it were); matches: [B, K] bool; seen: [B, K]
    bool, places whose match is known, a prefix of each block. Only places that were reached count:
    those behind matches alone.
    """
    reached = reached_places(matches) & seen
    loss = functional.binary_cross_entropy_with_logits(
        logits, matches.to(logits.dtype), reduction="none"
    )
    return (loss * reached).sum() / max(1, len(logits))


def reached_places(matches: Tensor) -> Tensor:
    """[B, K] bool: whether all places before are matches."""
    before = torch.ones_like(matches)
    before[:, 1:] = matches[:, :-1].cumprod(dim=1).bool()
    return before
