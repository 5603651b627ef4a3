"""The block-diffusion drafter over the pages: masks to hidden states to tokens."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adaflash.engine.batch_inputs import Paging, Span, build_inputs
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.heads import ChainHead
from adaflash.engine.sampler import ChoiceRow, Sampler
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.step import Block
from adaflash.engine.target import Verified
from adaflash.engine.types import Row

PENDING_ROWS = 128  # tokens whose context may wait to be written


@dataclass(frozen=True)
class _Pending:
    """Of a Verified, what the context is made from; the logits need not wait with it."""

    features: Tensor
    positions: Tensor
    slots: Tensor


class BlockDrafter:
    """See DraftSource. Embedding and LM head are the target's, cut to the draft vocabulary."""

    def __init__(
        self, drafter: Drafter, decoder: Decoder, kv: KVCache, sampler: Sampler, paging: Paging
    ) -> None:
        self._kv = kv
        self._paging = paging
        self._pending: list[_Pending] = []  # tokens whose context is not written yet
        self._embed = decoder.embed_tokens
        self._whole_head = decoder.head_weight
        self.swap(drafter, sampler)

    def swap(self, drafter: Drafter, sampler: Sampler) -> None:
        """Draft with these weights from now on; another drafter must have the shape of the first.

        Context that is written already stays as the old weights made it: that costs acceptance
        until it is written anew, and changes no text.
        """
        self._drafter = drafter
        self._sampler = sampler
        self._mask = (
            drafter.mask_embedding
            if drafter.config.mask_token_id is None
            else self._embed.weight[drafter.config.mask_token_id]
        )
        head = self._whole_head
        self._head_weight = head if drafter.token_ids is None else head[drafter.token_ids]

    @torch.inference_mode()
    def denoise(self, rows: Many[Row], width: int) -> Block:
        """Hidden states of blocks of `width`; needs width - 1 draft slots of every row."""
        self._write_pending()
        spans = [Span(row.sequence, row.start, width) for row in rows]
        inputs = build_inputs(spans, self._paging, causal=False)
        newest = [row.sequence.token_ids[row.start] for row in rows]
        anchors = self._embed(torch.tensor(newest, device=self._paging.device))
        masks = self._mask.expand(len(rows), width - 1, -1)
        x = torch.cat((anchors[:, None], masks), dim=1)  # [R, W, hidden]
        hidden = self._drafter(x.flatten(0, 1), inputs, self._kv)
        return Block(tuple(rows), hidden.view(x.shape))

    @torch.inference_mode()
    def estimate(self, block: Block) -> Estimate:
        """How far each block will be accepted; looks at hidden states only."""
        found = self._drafter.head.estimate(block.hidden)
        both = torch.cat((found.conditional, found.ratio[:, None]), dim=1).cpu().numpy()
        return Estimate(both[:, :-1].astype(np.float64), both[:, -1].astype(np.float64))

    @torch.inference_mode()
    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        """The first `lengths[r]` drafts of each block; the LM head runs on these alone."""
        if self._drafter.chain_head is not None:
            return self._propose_in_turn(block, lengths, self._drafter.chain_head)
        places = [(r, j) for r, length in enumerate(lengths) for j in range(1, length + 1)]
        if not places:
            return [()] * len(block.rows)
        row, position = torch.tensor(places, device=block.hidden.device).unbind(1)
        spots = [ChoiceRow(block.rows[r].sequence, unseen=j - 1) for r, j in places]
        chosen = iter(self._choose(block.hidden[row, position], spots))
        return [tuple(next(chosen) for _ in range(length)) for length in lengths]

    def _propose_in_turn(
        self, block: Block, lengths: Many[int], chain: ChainHead
    ) -> list[tuple[int, ...]]:
        """Place by place, over all blocks that go so far: each draft knows those before it."""
        drafts: list[tuple[int, ...]] = [()] * len(block.rows)
        active = [r for r, length in enumerate(lengths) if length > 0]
        state = chain.first_state(len(active), block.hidden)
        while active:
            place = len(drafts[active[0]])
            before = [self._last(block.rows[r], drafts[r]) for r in active]
            token = self._embed(torch.tensor(before, device=block.hidden.device))
            hidden, state = chain(block.hidden[active, place + 1], token, state)
            spots = [ChoiceRow(block.rows[r].sequence, drafts[r]) for r in active]
            for r, token_id in zip(active, self._choose(hidden, spots), strict=True):
                drafts[r] += (token_id,)
            kept = [n for n, r in enumerate(active) if lengths[r] > place + 1]
            active, state = [active[n] for n in kept], state[kept]
        return drafts

    def _choose(self, hidden: Tensor, spots: Many[ChoiceRow]) -> list[int]:
        """hidden: [N, hidden]. Tokens of the draft vocabulary, with the noise of their places."""
        logits = functional.linear(hidden, self._head_weight).float()
        return self._sampler.token_ids(logits, spots)

    def _last(self, row: Row, drafts: tuple[int, ...]) -> int:
        return drafts[-1] if drafts else row.sequence.token_ids[row.start]

    @torch.inference_mode()
    def observe(self, verified: Verified) -> None:
        """Keep the context of all tokens that the target has just computed.

        That of rejected drafts too: it lies behind the sequence's end and is written over. Nobody
        reads context before the next block is drafted, so while none is, several steps' tokens are
        written together: reading the weights for one row a step would cost more than the rows.
        """
        self._pending.append(_Pending(verified.features, verified.positions, verified.slots))
        if sum(len(item.slots) for item in self._pending) >= PENDING_ROWS:
            self._write_pending()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        features, positions, slots = (
            torch.cat([item.features for item in pending]),
            torch.cat([item.positions for item in pending]),
            torch.cat([item.slots for item in pending]),
        )
        # A slot may have been written over by now, or have a new owner: the newest row counts.
        newest = {slot: row for row, slot in enumerate(slots.tolist())}
        if len(newest) < len(slots):
            rows = torch.tensor(list(newest.values()), device=slots.device)
            features, positions, slots = features[rows], positions[rows], slots[rows]
        self._drafter.write_context(features, positions, slots, self._kv)
