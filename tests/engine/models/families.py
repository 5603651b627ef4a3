"""Tiny random checkpoints of each family, made by transformers, and how to run ours on pages."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.inputs import ForwardInputs
from adaflash.kernels.attention import PagedLayout
from adaflash.kernels.reference_attention import ReferenceAttention

VOCAB = 96
PAGE_SIZE = 4
CPU = torch.device("cpu")
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, PreTrainedModel] = {
    "llama": LlamaForCausalLM(LlamaConfig(**BASE, tie_word_embeddings=False)),
    "smollm (tied)": LlamaForCausalLM(LlamaConfig(**BASE, tie_word_embeddings=True)),
    "llama with biases": LlamaForCausalLM(LlamaConfig(**BASE, attention_bias=True, mlp_bias=True)),
    "llama3 scaling": LlamaForCausalLM(LlamaConfig(**BASE, rope_parameters=LLAMA3)),
    "linear scaling": LlamaForCausalLM(LlamaConfig(**BASE, rope_parameters=LINEAR)),
    "mistral": MistralForCausalLM(MistralConfig(**BASE, sliding_window=None)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**BASE)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**BASE, head_dim=32)),
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Weights far from their initial values, biases and norms included, so that each one counts."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.15 if parameter.dim() > 1 else 1 + noise * 0.2
    return model.eval()


def save(name: str, folder: Path) -> PreTrainedModel:
    """Write the family's checkpoint into `folder` and return the model itself."""
    model = randomize(FAMILIES[name])
    model.save_pretrained(folder)
    return model


class PagedRun:
    """Feeds tokens of several sequences through a decoder, on scattered pages."""

    def __init__(self, decoder: Decoder, num_sequences: int) -> None:
        self._decoder = decoder
        self._num_pages = 16  # of each sequence
        order = torch.randperm(
            num_sequences * self._num_pages, generator=torch.Generator().manual_seed(1)
        )
        self._pages = order.view(num_sequences, self._num_pages)
        self._lengths = [0] * num_sequences
        self._kv = KVCache(
            decoder.config,
            num_pages=len(order),
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            device=CPU,
        )

    @torch.inference_mode()
    def feed(self, pieces: list[Tensor]) -> list[Tensor]:
        """One ragged pass over the next tokens of each sequence; logits [n, VOCAB] of each."""
        positions = [
            torch.arange(len(piece)) + length
            for piece, length in zip(pieces, self._lengths, strict=True)
        ]
        self._lengths = [
            length + len(piece) for piece, length in zip(pieces, self._lengths, strict=True)
        ]
        slots = [
            pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for pages, position in zip(self._pages, positions, strict=True)
        ]
        inputs = ForwardInputs(
            torch.cat(positions),
            torch.cat(slots),
            ReferenceAttention().plan(self._layout(pieces), causal=True),
        )
        output = self._decoder(torch.cat(pieces), inputs, self._kv)
        logits = self._decoder.logits(output.hidden)
        return list(torch.split(logits, [len(piece) for piece in pieces]))

    def _layout(self, pieces: list[Tensor]) -> PagedLayout:
        used = [-(-length // PAGE_SIZE) for length in self._lengths]
        tables = [pages[:count] for pages, count in zip(self._pages, used, strict=True)]
        last = [length - (n - 1) * PAGE_SIZE for length, n in zip(self._lengths, used, strict=True)]
        return PagedLayout(
            qo_indptr=torch.tensor([0, *map(len, pieces)]).cumsum(0).int(),
            kv_indptr=torch.tensor([0, *used]).cumsum(0).int(),
            kv_indices=torch.cat(tables).int(),
            last_page_len=torch.tensor(last).int(),
            page_size=PAGE_SIZE,
        )
