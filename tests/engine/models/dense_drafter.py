"""DFlash's drafter as it is published (arXiv 2602.06036), over one whole sequence in plain torch.

No pages, no batch, no fused weights, nothing of ours: what the paged drafter is compared with.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class DenseDrafter:
    """Computes in float64 from the tensors of a checkpoint, by their published names."""

    tensors: Mapping[str, Tensor]
    head_dim: int
    rope_theta: float
    rms_norm_eps: float

    def hidden(self, features: Tensor, block: Tensor) -> Tensor:
        """States of a block after the last norm, [W, H].

        features: [S, taps * H], tapped target states of all tokens before the block; block: [W, H],
        embeddings of the newest known token, at position S, and of the masks behind it.
        """
        context = self._norm("hidden_norm", self._linear("fc", features.double()))
        x = block.double()
        layers = {name.split(".")[1] for name in self.tensors if name.startswith("layers.")}
        for layer in sorted(layers, key=int):
            prefix = f"layers.{layer}."
            x = x + self._attention(prefix, self._norm(prefix + "input_layernorm", x), context)
            x = x + self._mlp(prefix, self._norm(prefix + "post_attention_layernorm", x))
        return self._norm("norm", x)

    def _attention(self, prefix: str, block: Tensor, context: Tensor) -> Tensor:
        """Queries from the block; keys and values from the context and the block; no mask."""
        rows = torch.cat((context, block))
        start = len(context)
        q = self._turn(self._heads(prefix, "q", block), start)
        k = self._turn(self._heads(prefix, "k", rows), 0)
        v = self._heads(prefix, "v", rows)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        return self._linear(prefix + "self_attn.o_proj", attended.flatten(1))

    def _heads(self, prefix: str, part: str, rows: Tensor) -> Tensor:
        """[rows, heads, head_dim], normalised per head if the checkpoint has such norms."""
        heads = self._linear(f"{prefix}self_attn.{part}_proj", rows)
        heads = heads.view(len(rows), -1, self.head_dim)
        norm = f"{prefix}self_attn.{part}_norm"
        return self._norm(norm, heads) if f"{norm}.weight" in self.tensors else heads

    def _turn(self, heads: Tensor, start: int) -> Tensor:
        """Rotary embedding of rows at positions `start`, `start` + 1, ...: the halves are pairs."""
        half = self.head_dim // 2
        frequency = self.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (start + torch.arange(len(heads)))[:, None, None] * frequency
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            (
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ),
            dim=-1,
        )

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = (self._linear(f"{prefix}mlp.{part}_proj", x) for part in ("gate", "up"))
        return self._linear(prefix + "mlp.down_proj", functional.silu(gate) * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        product = x @ self.tensors[f"{name}.weight"].double().T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias.double()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = (x.square().mean(dim=-1, keepdim=True) + self.rms_norm_eps).sqrt()
        return x / size * self.tensors[f"{name}.weight"].double()
