"""A tiny random drafter for the tiny model, laid out as published checkpoints are."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_model import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB

DRAFT_LAYERS = 2
TAPS = [0, 1]
MASK = 259
HEAD_INNER = 16


def drafter_config(**changes: object) -> dict[str, object]:
    """config.json of a published drafter, shrunk."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
    } | changes


def drafter_tensors(
    *,
    seed: int = 0,
    qk_norm: bool = True,
    num_heads: int = HEADS,
    num_kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> dict[str, Tensor]:
    """Random weights under the published names, without a head."""
    generator = torch.Generator().manual_seed(seed)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(1.5 / shape[-1] ** 0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    weights = {
        "fc.weight": random(HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for layer in range(DRAFT_LAYERS):
        prefix = f"layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": random(q_size, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(kv_size, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(kv_size, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, q_size),
            prefix + "mlp.gate_proj.weight": random(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": random(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, FFN),
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
        }
        if qk_norm:
            weights |= {
                prefix + "self_attn.q_norm.weight": norm(head_dim),
                prefix + "self_attn.k_norm.weight": norm(head_dim),
            }
    return weights


def bias_tensors(*, seed: int = 2) -> dict[str, Tensor]:
    """Biases of q, k and v, which Qwen2's layers have."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    return {
        f"layers.{layer}.self_attn.{part}_proj.bias": torch.randn(size, generator=generator)
        for layer in range(DRAFT_LAYERS)
        for part, size in sizes.items()
    }


def threshold_head_tensors(*, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefix = "thresh_head_two_model."
    return {
        prefix + "down.weight": torch.randn(HEAD_INNER, 2 * HIDDEN, generator=generator) * 0.1,
        prefix + "down.bias": torch.randn(HEAD_INNER, generator=generator),
        prefix + "res.0.weight": torch.randn(HEAD_INNER, HEAD_INNER, generator=generator) * 0.2,
        prefix + "res.0.bias": torch.randn(HEAD_INNER, generator=generator),
        prefix + "out.weight": torch.randn(1, HEAD_INNER, generator=generator),
        prefix + "out.bias": torch.randn(1, generator=generator),
    }


def survival_head_tensors(*, seed: int = 1, block_size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefix = "survival_head."
    return {
        prefix + "down.weight": torch.randn(HEAD_INNER, 2 * HIDDEN, generator=generator) * 0.1,
        prefix + "down.bias": torch.randn(HEAD_INNER, generator=generator),
        prefix + "out.weight": torch.randn(1, HEAD_INNER, generator=generator),
        prefix + "position_bias": torch.randn(block_size - 1, generator=generator),
    }


def write_tiny_drafter(
    folder: Path,
    config: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a drafter; left out: a published one with the length head, several widths."""
    folder.mkdir(parents=True, exist_ok=True)
    dflash = {"mask_token_id": MASK, "target_layer_ids": TAPS, "widths": [2, 4, 8]}
    config = config or drafter_config(dflash_config=dflash)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors or drafter_tensors() | threshold_head_tensors()
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
