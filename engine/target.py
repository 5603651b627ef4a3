"""Running the target model over the pages."""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from adaflash.engine.batch_inputs import VerifyRow, build_inputs, logit_rows
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.kernels.attention import AttentionBackend


class TargetModel:
    """The target decoder, its K/V pages and the attention backend."""

    def __init__(self, decoder: Decoder, kv: KVCache, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._kv = kv
        self._attention = attention
        self._device = next(decoder.parameters()).device

    @torch.inference_mode()
    def verify(self, rows: Many[VerifyRow]) -> Tensor:
        """One ragged causal pass over known tokens and drafts; prefill chunks ride along.

        Returns float32 logits [sum of num_logits, vocab_size], in the order of `rows`.
        """
        inputs = build_inputs(rows, self._attention, self._kv.page_size, self._device)
        hidden = self._decoder(inputs, self._kv)
        chosen = torch.tensor(logit_rows(rows), dtype=torch.int64, device=self._device)
        logits: Tensor = self._decoder.logits(hidden.index_select(0, chosen))
        return logits
