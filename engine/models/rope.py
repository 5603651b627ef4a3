"""Rotary frequencies of a model, with the scalings that its checkpoint asks for."""

import math

import torch
from torch import Tensor

from adaflash.engine.models.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    TabulatedScaling,
)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32, in radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return inv_freq
        case LinearScaling(factor):
            return inv_freq / factor
        case TabulatedScaling(divisors):
            return inv_freq / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(inv_freq, scaling)


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's rule: by how often a wave fits into the original context."""
    waves = scaling.original_max_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / scaling.factor)
