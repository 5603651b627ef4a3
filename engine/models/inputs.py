"""What a model's forward pass takes besides its input rows."""

from dataclasses import dataclass

from torch import Tensor

from adaflash.kernels.attention import AttentionPlan


@dataclass(frozen=True)
class ForwardInputs:
    """The T token rows of one pass, ragged over requests, on the model's device."""

    positions: Tensor  # [T] int64, absolute
    slots: Tensor  # [T] int64, where each row's K/V goes: page * page_size + offset
    attention: AttentionPlan
