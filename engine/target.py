"""Running the target model over the pages."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.engine.batch_inputs import Paging, VerifyRow, build_inputs, logit_rows
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder


@dataclass(frozen=True)
class Verified:
    """What one target pass found out, over T tokens."""

    logits: Tensor  # [sum of num_logits, vocab_size] float32, in the order of the rows
    features: Tensor  # [T, taps * hidden], for the drafter
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64


class TargetModel:
    """The target decoder and its K/V pages. taps: layers whose outputs the drafter reads."""

    def __init__(
        self, decoder: Decoder, kv: KVCache, paging: Paging, taps: tuple[int, ...] = ()
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._paging = paging
        self._taps = taps

    @torch.inference_mode()
    def verify(self, rows: Many[VerifyRow]) -> Verified:
        """One ragged causal pass over known tokens and drafts; prefill chunks ride along."""
        device = self._paging.device
        inputs = build_inputs([row.span for row in rows], self._paging, causal=True)
        token_ids = torch.tensor([id_ for row in rows for id_ in row.token_ids], device=device)
        output = self._decoder(token_ids, inputs, self._kv, self._taps)
        chosen = torch.tensor(logit_rows(rows), dtype=torch.int64, device=device)
        logits = self._decoder.logits(output.hidden.index_select(0, chosen))
        return Verified(logits, output.features, inputs.positions, inputs.slots)
