"""Index tensors of a mixed batch, written out by hand."""

import torch

from adaflash.engine.batch_inputs import (
    Paging,
    Span,
    VerifyRow,
    build_inputs,
    layout_of,
    logit_rows,
)
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence
from adaflash.kernels.reference_attention import ReferenceAttention

CPU = torch.device("cpu")


def sequence(prompt: list[int], pages: list[int], committed: int) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=1)
    asked = Request(request_id="a", prompt_ids=prompt, sampling=sampling)
    return Sequence(asked, order=0, pages=pages, num_committed=committed)


def test_a_mixed_batch() -> None:
    chunk = sequence([10, 11, 12, 13, 14, 15], pages=[7, 2], committed=1)
    decode = sequence([20, 21, 22, 23, 24], pages=[4, 0], committed=4)
    rows = [
        VerifyRow(Row(chunk, 1, 3, RowKind.PREFILL)),  # stops short of the end: no logits
        VerifyRow(Row(decode, 4, 1, RowKind.VERIFY), drafts=(30, 31)),
    ]
    assert [row.token_ids for row in rows] == [[11, 12, 13], [24, 30, 31]]
    spans = [row.span for row in rows]
    assert spans == [Span(chunk, 1, 3), Span(decode, 4, 3)]
    inputs = build_inputs(spans, Paging(ReferenceAttention(), 4, CPU), causal=True)
    assert inputs.positions.tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs.slots.tolist() == [29, 30, 31, 0, 1, 2]
    assert logit_rows(rows) == [3, 4, 5]
    layout = layout_of(spans, 4, CPU)
    assert layout.qo_indptr.tolist() == [0, 3, 6]
    assert layout.kv_indptr.tolist() == [0, 1, 3]
    assert layout.kv_indices.tolist() == [7, 4, 0]
    assert layout.last_page_len.tolist() == [4, 3]
