"""The block-diffusion drafter (DFlash, arXiv 2602.06036): one pass proposes a whole block.

A block is the newest known token, the anchor, and masks behind it. Its rows see each other and, in
every layer, keys and values made from the target's hidden states at all positions before the
anchor. The state at the k-th mask, through the target's LM head, proposes the token k places behind
the anchor. Embedding and LM head are the target's, frozen.
"""

import torch
from torch import Tensor, nn

from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Layer, RMSNorm
from adaflash.engine.models.drafter_config import DrafterConfig
from adaflash.engine.models.heads import (
    ChainHead,
    LengthHead,
    NoHead,
    SurvivalHead,
    ThresholdHead,
)
from adaflash.engine.models.inputs import ForwardInputs
from adaflash.engine.models.rope import inverse_frequencies
from adaflash.kernels.rope import rotation


class Drafter(nn.Module):
    """The draft layers and what feeds them; shared by serving and training."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.fc = nn.Linear(len(config.tap_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(Layer(config.layers) for _ in range(config.layers.num_layers))
        self.norm = RMSNorm(size, eps)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.empty(size))
        self.thresh_head_two_model: ThresholdHead | None = None
        self.survival_head: SurvivalHead | None = None
        self.chain_head: ChainHead | None = None
        self.token_ids: Tensor | None  # [draft vocabulary] int64, ascending; None: the target's
        self.register_buffer("token_ids", None, persistent=False)
        self.inv_freq: Tensor  # [head_dim / 2] float32
        self.register_buffer("inv_freq", inverse_frequencies(config.layers), persistent=False)

    @property
    def head(self) -> LengthHead:
        return self.survival_head or self.thresh_head_two_model or NoHead(self.config.block_size)

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, kv: KVCache
    ) -> None:
        """Keep what the draft layers need of T tokens that the target has computed.

        features: [T, taps * hidden], the tapped layers' outputs; positions, slots: [T] int64.
        """
        context = self.hidden_norm(self.fc(features))
        turn = rotation(positions, self.inv_freq, context.dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            layer.self_attn.write_context(context, slots, turn, kv.layer(index))

    def forward(self, x: Tensor, inputs: ForwardInputs, kv: KVCache) -> Tensor:
        """Denoise blocks.

        x: [T, hidden], embeddings of anchors and masks; their K/V go into the slots of `inputs`,
        and the attention must not be causal. Returns [T, hidden], after the last norm.
        """
        turn = rotation(inputs.positions, self.inv_freq, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, inputs, turn, kv.layer(index))
        return self.norm(x)  # type: ignore[no-any-return]
