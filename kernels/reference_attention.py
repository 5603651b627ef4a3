"""Paged attention in plain torch: the oracle for every faster backend.

Requests of like size are gathered and attended to together: one gather and one SDPA per size class
and layer, no loop over requests or tokens. Padding costs at most a factor of two per dimension.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from adaflash.kernels.attention import PagedLayout

SMALL_QUERY = 16  # rows; decode and verify rows share one class up to here
SMALL_CONTEXT = 256  # tokens; the smallest context class
MAX_GATHERED_TOKENS = 1 << 17  # keys gathered at once, to bound the transient memory


@dataclass(frozen=True)
class _SizeClass:
    """G requests padded to q query rows and k keys. Padding repeats a request's own last entry."""

    query_rows: Tensor  # [G * q] int64
    slots: Tensor  # [G * k] int64
    visible: Tensor  # [G, 1, q, 1, k] bool


class ReferencePlan:
    """One step's size classes; see AttentionPlan."""

    def __init__(self, classes: list[_SizeClass]) -> None:
        self._classes = classes

    def run(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for size_class in self._classes:
            attended = _attend(size_class, query, key_pages, value_pages)
            # Padding rows repeat the last query of their request, so they write the same values.
            output.flatten(1).index_copy_(0, size_class.query_rows, attended)
        return output


class ReferenceAttention:
    """See AttentionBackend."""

    name = "reference (torch)"

    def plan(self, layout: PagedLayout, *, causal: bool) -> ReferencePlan:
        return ReferencePlan(
            [_gather_class(layout, members, causal) for members in _size_classes(layout)]
        )


def _attend(
    size_class: _SizeClass, query: Tensor, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    """query: [T, Hq, D]; pages as in AttentionPlan.run. Returns [G * q, Hq * D]."""
    num_requests, _, num_queries, _, num_keys = size_class.visible.shape
    num_kv_heads, head_dim = key_pages.shape[2:]
    heads_per_kv = query.shape[1] // num_kv_heads
    # Query heads that share a K/V head become query rows, so K/V need not be repeated (GQA).
    q = query.flatten(1).index_select(0, size_class.query_rows)
    q = q.view(num_requests, num_queries, num_kv_heads, heads_per_kv, head_dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(num_requests, num_kv_heads, -1, head_dim)
    kv_shape = (num_requests, num_keys, num_kv_heads, head_dim)
    k, v = (
        # As whole rows: index_select on three dimensions is ten times slower on the CPU.
        pages.flatten(0, 1).flatten(1).index_select(0, size_class.slots).view(kv_shape)
        for pages in (key_pages, value_pages)
    )
    visible = size_class.visible.expand(-1, -1, -1, heads_per_kv, -1).flatten(2, 3)
    out = functional.scaled_dot_product_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible
    )
    out = out.view(num_requests, num_kv_heads, num_queries, heads_per_kv, head_dim)
    return out.transpose(1, 2).reshape(-1, query.shape[1] * head_dim)


def _size_classes(layout: PagedLayout) -> Iterator[Tensor]:
    """Indices of the requests of each class, at most MAX_GATHERED_TOKENS keys together."""
    query_lens, context_lens = _lengths(layout)
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    sizes = zip(query_lens.tolist(), context_lens.tolist(), strict=True)
    for index, (query_len, context_len) in enumerate(sizes):
        if query_len > 0:
            key = (_ceil_power(query_len, SMALL_QUERY), _ceil_power(context_len, SMALL_CONTEXT))
            members[key].append(index)
    for (_, context_class), indices in members.items():
        step = max(1, MAX_GATHERED_TOKENS // context_class)
        for start in range(0, len(indices), step):
            yield torch.tensor(indices[start : start + step], dtype=torch.int64)


def _ceil_power(length: int, smallest: int) -> int:
    return max(smallest, 1 << (length - 1).bit_length())


def _lengths(layout: PagedLayout) -> tuple[Tensor, Tensor]:
    """Query rows and keys of each request, [R] int64 both."""
    num_pages = layout.kv_indptr.diff().long()
    context_lens = (num_pages - 1) * layout.page_size + layout.last_page_len.long()
    return layout.qo_indptr.diff().long(), context_lens


def _gather_class(layout: PagedLayout, members: Tensor, causal: bool) -> _SizeClass:
    query_lens, context_lens = (lengths[members, None] for lengths in _lengths(layout))  # [G, 1]
    query = torch.arange(int(query_lens.max())).minimum(query_lens - 1)  # [G, q]
    key = torch.arange(int(context_lens.max()))[None]  # [1, k]
    visible = (key < context_lens)[:, None, :]  # [G, 1, k]
    if causal:
        last_visible = query + context_lens - query_lens
        visible = visible & (key[:, None, :] <= last_visible[:, :, None])
    else:
        visible = visible.expand(-1, query.shape[1], -1)
    key = key.minimum(context_lens - 1)  # a request's own last key: never an unwritten slot
    page_at = layout.kv_indptr.long()[members, None] + key // layout.page_size
    device = layout.kv_indices.device
    pages = layout.kv_indices.index_select(0, page_at.flatten().to(device)).long()
    slots = pages * layout.page_size + (key % layout.page_size).flatten().to(device)
    rows = layout.qo_indptr.long()[members, None] + query
    return _SizeClass(rows.flatten().to(device), slots, visible[:, None, :, None, :].to(device))
