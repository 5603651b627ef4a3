"""Root-mean-square normalisation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / rms(x) over the last dimension, accumulated in float32.

    x: [..., H]; weight: [H]. Returns the dtype of `x`. Zhang & Sennrich, "Root Mean Square Layer
    Normalization" (2019).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)
