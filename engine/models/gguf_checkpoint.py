"""GGUF files as checkpoints: names and layouts of llama.cpp turned into Hugging Face's."""

import dataclasses
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.config import TabulatedScaling, from_gguf

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # Llama 3's scaling, as one divisor per frequency


class GgufCheckpoint:
    """One GGUF file, memory-mapped; quantised tensors are dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"cannot read {path} as GGUF: {error}") from error
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        scaling = tensors.pop(ROPE_FREQS, None)
        # GGUF counts a tensor's dimensions from the innermost one.
        shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in tensors.items()}
        config = from_gguf(_scalars(reader), shapes)
        if scaling is not None:
            divisors = tuple(_dequantised(scaling).flatten().tolist())
            config = dataclasses.replace(config, rope_scaling=TabulatedScaling(divisors))
        self.config = config
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> Tensor:
        values = _dequantised(self._tensors[name])
        if self.config.family == "llama" and ".self_attn.q_proj." in name:
            return _undo_interleaving(values, self.config.num_heads)
        if self.config.family == "llama" and ".self_attn.k_proj." in name:
            return _undo_interleaving(values, self.config.num_kv_heads)
        return values


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    return name  # not one of ours: the loader will name it as left over


def _scalars(reader: gguf.GGUFReader) -> dict[str, object]:
    """Numbers and strings of the header; its lists are the tokenizer's."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] is not gguf.GGUFValueType.ARRAY
    }


def _dequantised(tensor: gguf.ReaderTensor) -> Tensor:
    try:
        # Without the memmap subclass, whose bookkeeping costs more than the arithmetic.
        values = gguf.quants.dequantize(tensor.data.view(np.ndarray), tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which the gguf "
            "package cannot dequantise"
        ) from error
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _undo_interleaving(values: Tensor, num_heads: int) -> Tensor:
    """llama.cpp stores the two rotation halves of a head alternating: pairs back to halves.

    values: [num_heads * head_dim, ...].
    """
    half = values.shape[0] // num_heads // 2
    pairs = values.view(num_heads, half, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
