"""The torch reference against a straightforward loop, on ragged batches over scattered pages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaflash.kernels.attention import PagedLayout
from adaflash.kernels.kv_write import write_kv
from adaflash.kernels.reference_attention import ReferenceAttention

HEAD_DIM = 8


def one_request(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """q: [q, Hq, D]; k, v: [k, Hkv, D]. Attention of one request, head by head."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(HEAD_DIM)
        if causal:
            ones = torch.ones(scores.shape, dtype=torch.bool)
            scores = scores.masked_fill(ones.triu(len(k) - len(q) + 1), -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // group]
    return out


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=6
    ).filter(lambda sizes: any(q for q, _ in sizes)),
    page_size=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 3]),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_a_loop(
    lengths: list[tuple[int, int]], page_size: int, group: int, causal: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    contexts = [max(1, q + past) for q, past in lengths]
    num_pages = [math.ceil(context / page_size) for context in contexts]
    pool = torch.randperm(sum(num_pages) + 3, generator=generator)[: sum(num_pages)]
    # Slots that nobody wrote hold NaN: reading one would show.
    shape = (sum(num_pages) + 3, page_size, 2, HEAD_DIM)
    key_pages, value_pages = torch.full(shape, math.nan), torch.full(shape, math.nan)
    queries, expected, start = [], [], 0
    for (q_len, _), context, pages in zip(lengths, contexts, num_pages, strict=True):
        q = torch.randn(q_len, 2 * group, HEAD_DIM, generator=generator)
        k = torch.randn(context, 2, HEAD_DIM, generator=generator)
        v = torch.randn(context, 2, HEAD_DIM, generator=generator)
        token = torch.arange(context)
        slots = pool[start + token // page_size] * page_size + token % page_size
        write_kv(key_pages, value_pages, k, v, slots)
        queries.append(q)
        expected.append(one_request(q, k, v, causal=causal))
        start += pages
    layout = PagedLayout(
        qo_indptr=indptr([q for q, _ in lengths]),
        kv_indptr=indptr(num_pages),
        kv_indices=pool.int(),
        last_page_len=torch.tensor(
            [c - (p - 1) * page_size for c, p in zip(contexts, num_pages, strict=True)]
        ).int(),
        page_size=page_size,
    )
    plan = ReferenceAttention().plan(layout, causal=causal)
    out = plan.run(torch.cat(queries), key_pages, value_pages)
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_large_batches_are_gathered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounding the gather changes nothing in the result."""
    generator = torch.Generator().manual_seed(0)
    layout = PagedLayout(
        qo_indptr=indptr([1] * 8),
        kv_indptr=indptr([2] * 8),
        kv_indices=torch.arange(16).int(),
        last_page_len=torch.full((8,), 3).int(),
        page_size=4,
    )
    query = torch.randn(8, 2, HEAD_DIM, generator=generator)
    key_pages, value_pages = torch.randn(2, 16, 4, 1, HEAD_DIM, generator=generator)
    whole = ReferenceAttention().plan(layout, causal=True).run(query, key_pages, value_pages)
    monkeypatch.setattr("adaflash.kernels.reference_attention.MAX_GATHERED_TOKENS", 600)
    pieces = ReferenceAttention().plan(layout, causal=True).run(query, key_pages, value_pages)
    torch.testing.assert_close(pieces, whole)
