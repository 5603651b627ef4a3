"""Rotary position embedding (Su et al., "RoFormer", 2021), half-rotation layout."""

import torch
from torch import Tensor


def rotation(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a step's positions, for all layers.

    positions: [T] int64; inv_freq: [D / 2] float32. Returns two [T, 1, D] tensors of `dtype`; the
    sine of the first half is negated, so that `rotate` needs no negation.
    """
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
        torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos, sin: [T, 1, D] from `rotation`."""
    half = x.shape[-1] // 2
    return x * cos + x.roll(half, dims=-1) * sin
