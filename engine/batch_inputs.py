"""From a plan's rows to index tensors; the only place that makes them."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from adaflash.engine.models.inputs import ForwardInputs
from adaflash.engine.types import Row
from adaflash.kernels.attention import AttentionBackend, PagedLayout


@dataclass(frozen=True)
class VerifyRow:
    """A plan's row with the drafts to verify after its known tokens; none is plain decoding."""

    row: Row
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.row.num_tokens + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Positions at which the target chooses: after the newest token and after each draft."""
        return 1 + len(self.drafts) if self.row.reaches_end else 0


def layout_of(rows: Many[VerifyRow], page_size: int, device: torch.device) -> PagedLayout:
    """Ragged query lengths and page tables of the rows, new tokens included."""
    qo_indptr, kv_indptr, kv_indices, last_page_len = [0], [0], list[int](), list[int]()
    for row in rows:
        context_len = row.row.start + row.num_tokens
        num_pages = -(-context_len // page_size)
        qo_indptr.append(qo_indptr[-1] + row.num_tokens)
        kv_indptr.append(kv_indptr[-1] + num_pages)
        kv_indices.extend(row.row.sequence.pages[:num_pages])
        last_page_len.append(context_len - (num_pages - 1) * page_size)
    return PagedLayout(
        qo_indptr=torch.tensor(qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32, device=device),
        last_page_len=torch.tensor(last_page_len, dtype=torch.int32),
        page_size=page_size,
    )


def build_inputs(
    rows: Many[VerifyRow], backend: AttentionBackend, page_size: int, device: torch.device
) -> ForwardInputs:
    """One ragged causal pass over all rows. Token rows are in the order of `rows`."""
    token_ids, positions, slots = list[int](), list[int](), list[int]()
    for row in rows:
        sequence, start = row.row.sequence, row.row.start
        token_ids.extend(sequence.token_ids[start : start + row.row.num_tokens])
        token_ids.extend(row.drafts)
        for position in range(start, start + row.num_tokens):
            positions.append(position)
            page = sequence.pages[position // page_size]
            slots.append(page * page_size + position % page_size)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        attention=backend.plan(layout_of(rows, page_size, device), causal=True),
    )


def logit_rows(rows: Many[VerifyRow]) -> list[int]:
    """Indices of the token rows whose logits are wanted: the last `num_logits` of each row."""
    indices: list[int] = []
    end = 0
    for row in rows:
        end += row.num_tokens
        indices.extend(range(end - row.num_logits, end))
    return indices
