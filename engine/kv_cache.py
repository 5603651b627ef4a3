"""The tensors behind the pages. Which page belongs to whom is engine/pages.py's business."""

import torch
from torch import Tensor


class KVCache:
    """Key and value pages of every layer: [num_pages, page_size, num_kv_heads, head_dim] each."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        # empty().zero_() touches the memory now, so that the process does not grow while serving.
        self._keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self._values = torch.empty(shape, dtype=dtype, device=device).zero_()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key pages and value pages of one layer."""
        return self._keys[index], self._values[index]
