"""The tensors behind the pages. Which page belongs to whom is engine/pages.py's business."""

import torch
from torch import Tensor

from adaflash.engine.models.config import ModelConfig


class KVCache:
    """Key and value pages of every layer: [num_pages, page_size, num_kv_heads, head_dim] each."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        shape = (model.num_layers, num_pages, page_size, model.num_kv_heads, model.head_dim)
        # empty().zero_() touches the memory now, so that the process does not grow while serving.
        self._keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self._values = torch.empty(shape, dtype=dtype, device=device).zero_()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key pages and value pages of one layer."""
        return self._keys[index], self._values[index]


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Of keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
