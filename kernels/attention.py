"""Paged attention: plan once per step, run once per layer. Shaped like FlashInfer's wrappers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PagedLayout:
    """Which queries belong to which request, and where its keys and values lie.

    R requests, T query rows in all. Request r owns the query rows
    `qo_indptr[r] : qo_indptr[r + 1]` and the pages `kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`,
    of which the last holds `last_page_len[r]` (1 .. page_size) tokens. The new tokens' keys are
    already written and counted. Index arrays are int32; indptr and lengths live on the host,
    `kv_indices` on the device of the cache.
    """

    qo_indptr: Tensor  # [R + 1] int32, host
    kv_indptr: Tensor  # [R + 1] int32, host, in pages
    kv_indices: Tensor  # [kv_indptr[-1]] int32, device
    last_page_len: Tensor  # [R] int32, host
    page_size: int


class AttentionPlan(Protocol):
    """What `plan` prepared for one step; the same for all layers."""

    def run(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
        """Attend.

        query: [T, num_heads, head_dim]; key_pages, value_pages: [pages, page_size, num_kv_heads,
        head_dim]. Returns [T, num_heads, head_dim] in the dtype of `query`.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans. `name` is what the start-up log shows."""

    name: str

    def plan(self, layout: PagedLayout, *, causal: bool) -> AttentionPlan:
        """Prepare one step.

        causal: query i of q sees keys j <= i + kv_len - q_len (bottom-right aligned); otherwise
        every query of a request sees all its keys.
        """
        ...
