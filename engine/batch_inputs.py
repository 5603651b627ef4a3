"""From a plan's rows to index tensors; the only place that makes them."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from adaflash.engine.messages import DraftedBy
from adaflash.engine.models.inputs import ForwardInputs
from adaflash.engine.types import Row, Sequence
from adaflash.kernels.attention import AttentionBackend, PagedLayout


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one sequence that a pass computes."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class VerifyRow:
    """A plan's row with the drafts to verify after its known tokens; none is plain decoding."""

    row: Row
    drafts: tuple[int, ...] = ()
    drafted_by: DraftedBy | None = None  # None without drafts

    @property
    def span(self) -> Span:
        return Span(self.row.sequence, self.row.start, self.num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Known tokens, then drafts."""
        start = self.row.start
        known = self.row.sequence.token_ids[start : start + self.row.num_tokens]
        return [*known, *self.drafts]

    @property
    def num_tokens(self) -> int:
        return self.row.num_tokens + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Positions at which the target chooses: after the newest token and after each draft."""
        return 1 + len(self.drafts) if self.row.reaches_end else 0


def layout_of(spans: Many[Span], page_size: int, device: torch.device) -> PagedLayout:
    """Ragged query lengths and page tables of the spans, their own tokens included."""
    qo_indptr, kv_indptr, kv_indices, last_page_len = [0], [0], list[int](), list[int]()
    for span in spans:
        num_pages = -(-span.end // page_size)
        qo_indptr.append(qo_indptr[-1] + span.num_tokens)
        kv_indptr.append(kv_indptr[-1] + num_pages)
        kv_indices.extend(span.sequence.pages[:num_pages])
        last_page_len.append(span.end - (num_pages - 1) * page_size)
    return PagedLayout(
        qo_indptr=torch.tensor(qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32, device=device),
        last_page_len=torch.tensor(last_page_len, dtype=torch.int32),
        page_size=page_size,
    )


@dataclass(frozen=True)
class Paging:
    """Where the pages are and what attends over them."""

    attention: AttentionBackend
    page_size: int  # tokens
    device: torch.device


def build_inputs(spans: Many[Span], paging: Paging, *, causal: bool) -> ForwardInputs:
    """One ragged pass over all spans, whose rows come in the order of `spans`."""
    positions, slots = list[int](), list[int]()
    size = paging.page_size
    for span in spans:
        pages = span.sequence.pages
        for position in range(span.start, span.end):
            positions.append(position)
            slots.append(pages[position // size] * size + position % size)
    return ForwardInputs(
        positions=torch.tensor(positions, device=paging.device),
        slots=torch.tensor(slots, device=paging.device),
        attention=paging.attention.plan(layout_of(spans, size, paging.device), causal=causal),
    )


def logit_rows(rows: Many[VerifyRow]) -> list[int]:
    """Indices of the token rows whose logits are wanted: the last `num_logits` of each row."""
    indices: list[int] = []
    end = 0
    for row in rows:
        end += row.num_tokens
        indices.extend(range(end - row.num_logits, end))
    return indices
