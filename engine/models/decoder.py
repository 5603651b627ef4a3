"""One config-driven decoder: Llama, SmolLM, Mistral, Qwen2 and Qwen3 dense."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.inputs import ForwardInputs
from adaflash.engine.models.rope import inverse_frequencies
from adaflash.kernels.activation import silu_mul
from adaflash.kernels.kv_write import write_kv
from adaflash.kernels.norm import rms_norm
from adaflash.kernels.rope import rotate, rotation

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, 1, head_dim] each


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over the pages; q, k and v in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        num_all = config.num_heads + 2 * config.num_kv_heads
        width = config.num_heads * config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, num_all * config.head_dim, bias=config.qkv_bias
        )
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, inputs: ForwardInputs, turn: Rotation, pages: tuple[Tensor, Tensor]
    ) -> Tensor:
        """x: [T, hidden]; pages: this layer's key and value pages. Returns [T, hidden]."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = torch.split(qkv, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        # Queries and keys turn together: one call instead of two.
        q, k = torch.split(rotate(qk, *turn), [self.num_heads, self.num_kv_heads], dim=1)
        write_kv(*pages, k, v, inputs.slots)
        attended = inputs.attention.run(q, *pages)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]

    def write_context(
        self, x: Tensor, slots: Tensor, turn: Rotation, pages: tuple[Tensor, Tensor]
    ) -> None:
        """Write the K/V of rows that nothing asks from. x: [T, hidden]; slots: [T]."""
        start = self.num_heads * self.head_dim
        bias = self.qkv_proj.bias[start:] if self.qkv_proj.bias is not None else None
        kv = functional.linear(x, self.qkv_proj.weight[start:], bias)
        k, v = kv.view(len(x), 2 * self.num_kv_heads, self.head_dim).chunk(2, dim=1)
        if self.k_norm is not None:
            k = self.k_norm(k)
        write_kv(*pages, rotate(k, *turn), v, slots)


class MLP(nn.Module):
    """Gated MLP; gate and up in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, inputs: ForwardInputs, turn: Rotation, pages: tuple[Tensor, Tensor]
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), inputs, turn, pages)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DecoderOutput:
    hidden: Tensor  # [T, hidden], after the last norm
    features: Tensor  # [T, taps * hidden], the outputs of the tapped layers side by side


class Decoder(nn.Module):
    """Token rows in, final hidden states out; logits only for the rows that are asked for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.inv_freq: Tensor  # [head_dim / 2] float32, whatever the dtype of the weights
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def forward(
        self, token_ids: Tensor, inputs: ForwardInputs, kv: KVCache, taps: Sequence[int] = ()
    ) -> DecoderOutput:
        """Compute the T rows of a step, writing their K/V.

        token_ids: [T] int64; taps: layers whose outputs are wanted, from 0.
        """
        x = self.embed_tokens(token_ids)
        turn = rotation(inputs.positions, self.inv_freq, x.dtype)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, inputs, turn, kv.layer(index))
            if index in taps:
                outputs[index] = x
        features = [outputs[index] for index in taps] or [x[:, :0]]
        return DecoderOutput(self.norm(x), torch.cat(features, dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [L, hidden], rows of `forward`'s result. Returns [L, vocab_size] float32."""
        return functional.linear(hidden, self.head_weight).float()

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, hidden]"""
        tied = self.config.tie_word_embeddings
        return self.embed_tokens.weight if tied else self.lm_head.weight
