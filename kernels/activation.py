"""Gated activations."""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up: [T, 2 * F], gate first. Returns [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
