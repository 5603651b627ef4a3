"""The drafter over whole texts at once: many blocks per text, no pages.

The same module that serving runs, with the same weights; only the attention is laid out otherwise.
A test holds both to the same hidden states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from adaflash.engine.models.decoder import Attention, Layer
from adaflash.engine.models.drafter import Drafter
from adaflash.kernels.rope import rotate, rotation


@dataclass(frozen=True)
class BlockBatch:
    """A blocks of W rows in each of S texts, texts padded to L tokens."""

    features: Tensor  # [S, L, taps * hidden]
    lengths: Tensor  # [S] int64, tokens of each text
    anchors: Tensor  # [S, A] int64, position of the newest known token of each block
    anchor_embeddings: Tensor  # [S, A, hidden]
    width: int


def denoise(drafter: Drafter, mask: Tensor, batch: BlockBatch) -> Tensor:
    """Hidden states of all blocks [S, A, W, hidden]. mask: [hidden], the mask's embedding."""
    num_texts, num_blocks = batch.anchors.shape
    context = drafter.hidden_norm(drafter.fc(batch.features))  # [S, L, hidden]
    masks = mask.to(batch.anchor_embeddings.dtype).expand(
        num_texts, num_blocks, batch.width - 1, -1
    )
    x = torch.cat((batch.anchor_embeddings[:, :, None], masks), dim=2)
    length = batch.features.shape[1]
    positions = batch.anchors[..., None] + torch.arange(batch.width, device=x.device)
    turns = (
        rotation(torch.arange(length, device=x.device), drafter.inv_freq, x.dtype),
        rotation(positions.flatten(), drafter.inv_freq, x.dtype),
    )
    seen = torch.arange(length, device=x.device) < batch.anchors[..., None]  # [S, A, L]
    for layer in drafter.layers:
        assert isinstance(layer, Layer)
        attended = _attend(layer.self_attn, layer.input_layernorm(x), context, turns, seen)
        x = x + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed: Tensor = drafter.norm(x)
    return normed


Turn = tuple[Tensor, Tensor]


def _attend(
    attention: Attention, x: Tensor, context: Tensor, turns: tuple[Turn, Turn], seen: Tensor
) -> Tensor:
    """x: [S, A, W, hidden]; context: [S, L, hidden]; seen: [S, A, L], the context of each block."""
    num_texts, num_blocks, width, _ = x.shape
    length, heads, dim = context.shape[1], attention.num_kv_heads, attention.head_dim
    context_turn, block_turn = turns
    start = attention.num_heads * dim
    bias = attention.qkv_proj.bias
    kv = functional.linear(
        context, attention.qkv_proj.weight[start:], None if bias is None else bias[start:]
    )
    kv = kv.view(num_texts * length, 2 * heads, dim)
    context_k, context_v = _normed_key(attention, kv[:, :heads]), kv[:, heads:]
    context_k = rotate(context_k.view(num_texts, length, heads, dim), *context_turn)
    qkv = attention.qkv_proj(x).view(-1, attention.num_heads + 2 * heads, dim)
    q, k, v = qkv.split([attention.num_heads, heads, heads], dim=1)
    if attention.q_norm is not None:
        q = attention.q_norm(q)
    q, k = rotate(q, *block_turn), rotate(_normed_key(attention, k), *block_turn)
    group = attention.num_heads // heads
    # [S, Hkv, A * W * group, D] against [S, Hkv, L, D]
    q = q.view(num_texts, num_blocks, width, heads, group, dim) * dim**-0.5
    wide = q.permute(0, 3, 1, 2, 4, 5).reshape(num_texts, heads, -1, dim)
    far = wide @ context_k.permute(0, 2, 3, 1)
    far = far.view(num_texts, heads, num_blocks, width * group, length)
    far = far.masked_fill(~seen[:, None, :, None], -torch.inf)
    # Within each block: [S, Hkv, A, W * group, D] against [S, Hkv, A, W, D]
    near_k, near_v = (
        t.view(num_texts, num_blocks, width, heads, dim).permute(0, 3, 1, 2, 4) for t in (k, v)
    )
    blocks = wide.view(num_texts, heads, num_blocks, width * group, dim)
    near = blocks @ near_k.transpose(-1, -2)
    weights = torch.cat((far, near), dim=-1).softmax(dim=-1, dtype=torch.float32).to(x.dtype)
    values = context_v.view(num_texts, length, heads, dim).permute(0, 2, 1, 3)
    far_weights = weights[..., :length].flatten(2, 3)  # [S, Hkv, A * W * group, L]
    out = (far_weights @ values).view_as(blocks) + weights[..., length:] @ near_v
    out = out.view(num_texts, heads, num_blocks, width, group, dim).permute(0, 2, 3, 1, 4, 5)
    projected: Tensor = attention.o_proj(out.reshape(num_texts, num_blocks, width, -1))
    return projected


def _normed_key(attention: Attention, k: Tensor) -> Tensor:
    return k if attention.k_norm is None else attention.k_norm(k)


def chain_states(drafter: Drafter, hidden: Tensor, tokens: Tensor) -> Tensor:
    """What the LM head reads at places 1 .. W - 1, each knowing the tokens before it.

    hidden: [N, W, hidden]; tokens: [N, W - 1, hidden], embeddings of the anchor and of the text
    behind it. Returns [N, W - 1, hidden]. Without a chain head: the hidden states.
    """
    chain = drafter.chain_head
    if chain is None:
        return hidden[:, 1:]
    state = chain.first_state(len(hidden), hidden)
    states = []
    for place in range(hidden.shape[1] - 1):
        read, state = chain(hidden[:, place + 1], tokens[:, place], state)
        states.append(read)
    return torch.stack(states, dim=1)
