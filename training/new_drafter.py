"""A fresh drafter for a target, and drafters on disk."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import RMSNorm
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.drafter_config import DrafterConfig, default_tap_layers
from adaflash.engine.models.heads import ChainHead, SurvivalHead
from adaflash.engine.models.weights import TOKEN_IDS, sources_of
from adaflash.engine.trajectories import Trajectory
from adaflash.training.config import DrafterShape

NUM_TAPS = 5


def new_drafter(target: ModelConfig, shape: DrafterShape, token_ids: Tensor, seed: int) -> Drafter:
    """Random weights, float32. token_ids: [N] int64, ascending, what it can propose."""
    drafter = Drafter(_config_of(target, shape))
    size = target.hidden_size
    drafter.survival_head = SurvivalHead(size, shape.head_size, shape.block_size)
    if shape.chain_size is not None:
        drafter.chain_head = ChainHead(size, shape.chain_size, target.rms_norm_eps)
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.data.fill_(1.0)
    # What is added to a residual starts small, the chain's correction at nothing.
    for layer in drafter.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
            linear.weight.data.mul_((2 * shape.num_layers) ** -0.5)  # type: ignore[union-attr,operator]
    if drafter.chain_head is not None:
        drafter.chain_head.out.weight.data.zero_()
    drafter.mask_embedding.data.normal_(std=0.02, generator=generator)
    drafter.token_ids = token_ids
    return drafter


def draft_vocabulary(
    trajectories: Iterable[Trajectory], size: int, always: Iterable[int]
) -> tuple[Tensor, float]:
    """The most frequent tokens of the answers [size] int64, and the share of the text they cover.

    always: token ids that belong to it however seldom they are, such as the end of a turn.
    """
    counts: Counter[int] = Counter()
    for item in trajectories:
        counts.update(item.token_ids[item.prompt_len :])
    kept = dict.fromkeys(always)
    kept.update(dict.fromkeys(token for token, _ in counts.most_common()))
    # Few texts do not fill it: byte-pair tokenizers number frequent tokens low.
    kept.update(dict.fromkeys(range(size)))
    token_ids = sorted(list(kept)[:size])
    covered = sum(counts[token] for token in token_ids)
    return torch.tensor(token_ids), covered / max(1, counts.total())


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config and weights as checkpoints have them; the heads in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in drafter.named_parameters():
        kept = torch.float32 if "survival_head" in name or "thresh_head" in name else dtype
        start = 0
        for source in sources_of(name, parameter, drafter.config.layers, prefix=""):
            rows = parameter.detach()[start : start + source.num_rows]
            tensors[source.name] = rows.to(kept).contiguous().clone()
            start += source.num_rows
    if drafter.token_ids is not None:
        tensors[TOKEN_IDS] = drafter.token_ids.to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_as_json(drafter.config), indent=2) + "\n")


def _config_of(target: ModelConfig, shape: DrafterShape) -> DrafterConfig:
    import dataclasses

    taps = shape.taps or default_tap_layers(target.num_layers, NUM_TAPS)
    layers = dataclasses.replace(
        target,
        num_layers=shape.num_layers,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        family="qwen3",
        rope_scaling=None,
        tie_word_embeddings=False,
    )
    return DrafterConfig(
        layers=layers,
        block_size=shape.block_size,
        widths=tuple(sorted(shape.widths)),
        tap_layers=tuple(taps),
        num_target_layers=target.num_layers,
        mask_token_id=None,
    )


def _as_json(config: DrafterConfig) -> dict[str, object]:
    layers = config.layers
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": layers.family,
        "block_size": config.block_size,
        "vocab_size": layers.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_theta": layers.rope_theta,
        "max_position_embeddings": layers.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": layers.qkv_bias,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layers),
            "widths": list(config.widths),
        },
    }
