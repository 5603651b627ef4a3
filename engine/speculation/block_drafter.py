"""The block-diffusion drafter over the pages: masks to hidden states to tokens."""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch.nn import functional

from adaflash.engine.batch_inputs import Paging, Span, build_inputs
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.sampler import ChoiceRow, Sampler
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.step import Block
from adaflash.engine.target import Verified
from adaflash.engine.types import Row


class BlockDrafter:
    """See DraftSource. Embedding and LM head are the target's, cut to the draft vocabulary."""

    def __init__(
        self, drafter: Drafter, decoder: Decoder, kv: KVCache, sampler: Sampler, paging: Paging
    ) -> None:
        self._drafter = drafter
        self._kv = kv
        self._sampler = sampler
        self._paging = paging
        self._embed = decoder.embed_tokens
        self._mask = (
            drafter.mask_embedding
            if drafter.config.mask_token_id is None
            else self._embed.weight[drafter.config.mask_token_id]
        )
        head = decoder.head_weight
        self._head_weight = head if drafter.token_ids is None else head[drafter.token_ids]

    @torch.inference_mode()
    def denoise(self, rows: Many[Row], width: int) -> Block:
        """Hidden states of blocks of `width`; needs width - 1 draft slots of every row."""
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
        places = [(r, j) for r, length in enumerate(lengths) for j in range(1, length + 1)]
        if not places:
            return [()] * len(block.rows)
        row, position = torch.tensor(places, device=block.hidden.device).unbind(1)
        logits = functional.linear(block.hidden[row, position], self._head_weight).float()
        chosen = iter(
            self._sampler.token_ids(
                logits, [ChoiceRow(block.rows[r].sequence, unseen=j - 1) for r, j in places]
            )
        )
        return [tuple(next(chosen) for _ in range(length)) for length in lengths]

    @torch.inference_mode()
    def observe(self, verified: Verified) -> None:
        """Keep the context of all tokens that the target has just computed.

        That of rejected drafts too: it lies behind the sequence's end and is written over.
        """
        self._drafter.write_context(verified.features, verified.positions, verified.slots, self._kv)
