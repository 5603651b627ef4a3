"""Small networks on top of a drafted block's hidden states; serving and training share them.

Length heads say how much of a block will survive. They run before the draft LM head and never see a
drafted token, so that what they decide can bias nothing. The chain head runs with the LM head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaflash.engine.models.decoder import RMSNorm


@dataclass(frozen=True)
class LengthEstimate:
    """For R blocks of W tokens, W - 1 of them drafts."""

    conditional: Tensor  # [R, W - 1] float32, P(draft accepted | all before it were)
    ratio: Tensor  # [R] float32, expected share of a whole block, the newest known token included


class LengthHead(Protocol):
    """`name` is what the start-up log shows."""

    name: str

    def estimate(self, hidden: Tensor) -> LengthEstimate:
        """hidden: [R, W, hidden], a block's states after the last norm."""
        ...


class ThresholdHead(nn.Module):
    """The published head: one share of the block (arXiv 2607.19223, `thresh_head_two_model`)."""

    name = "threshold"

    def __init__(self, hidden_size: int, inner_size: int, block_size: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, inner_size)
        self.res = nn.ModuleList([nn.Linear(inner_size, inner_size)])
        self.out = nn.Linear(inner_size, 1)
        self.block_size = block_size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, W, hidden]. Returns the share of a block [R] in (0, 1)."""
        x = hidden.to(self.down.weight.dtype)
        z = functional.silu(self.down(torch.cat((x.mean(dim=1), x[:, -1]), dim=-1)))
        z = z + functional.silu(self.res[0](z))
        ratio: Tensor = torch.sigmoid(self.out(z))[:, 0]
        return ratio.float()

    def estimate(self, hidden: Tensor) -> LengthEstimate:
        ratio = self(hidden)
        # The share stands for 1 + a of block_size tokens. Drafts that are accepted with the same
        # chance c each, until one is not, have the mean a = c / (1 - c).
        accepted = (ratio * self.block_size - 1).clamp(min=0)
        conditional = (accepted / (1 + accepted))[:, None].expand(-1, hidden.shape[1] - 1)
        return LengthEstimate(conditional, ratio)


class SurvivalHead(nn.Module):
    """One chance per position: from its own state, the block's mean and a bias by position.

    A discrete-time hazard model: c_j = sigmoid(out(SiLU(down([h_j; mean h]))) + bias_j), and a
    draft survives with the product of the chances up to it.
    """

    name = "survival"

    def __init__(self, hidden_size: int, inner_size: int, block_size: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, inner_size)
        self.out = nn.Linear(inner_size, 1, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(block_size - 1))
        self.block_size = block_size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, W, hidden]. Returns logits of the conditional chances [R, W - 1]."""
        x = hidden.to(self.down.weight.dtype)
        mean = x.mean(dim=1, keepdim=True).expand(-1, x.shape[1] - 1, -1)
        z = functional.silu(self.down(torch.cat((x[:, 1:], mean), dim=-1)))
        logits: Tensor = self.out(z)[..., 0] + self.position_bias[: x.shape[1] - 1]
        return logits.float()

    def estimate(self, hidden: Tensor) -> LengthEstimate:
        return _estimate(torch.sigmoid(self(hidden)), self.block_size)


class NoHead:
    """For drafters without a head: every draft has even chances; calibration learns the rest."""

    name = "none (acceptance by position, learned while serving)"

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def estimate(self, hidden: Tensor) -> LengthEstimate:
        num_rows, width = hidden.shape[:2]
        even = torch.full((num_rows, width - 1), 0.5, device=hidden.device)
        return _estimate(even, self.block_size)


class ChainHead(nn.Module):
    """Lets each draft know those before it: a recurrent net along the block.

    u_k = SiLU(hidden(h_k) + token(norm(e_{k-1})) + state(u_{k-1})) and g_k = h_k + out(u_k), with
    e_{k-1} the embedding of the token before and u_0 = 0; the LM head reads g_k instead of h_k. A
    draft matters only if all before it were right, so in training these are the text's own tokens.
    """

    def __init__(self, hidden_size: int, inner_size: int, eps: float) -> None:
        super().__init__()
        self.token_norm = RMSNorm(hidden_size, eps)
        self.hidden = nn.Linear(hidden_size, inner_size)
        self.token = nn.Linear(hidden_size, inner_size, bias=False)
        self.state = nn.Linear(inner_size, inner_size, bias=False)
        self.out = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One place further, for N blocks.

        hidden: [N, hidden], states at this place; token: [N, hidden], embeddings of the tokens
        before it; state: [N, inner]. Returns what the LM head reads [N, hidden], and the new state.
        """
        inputs = self.hidden(hidden) + self.token(self.token_norm(token)) + self.state(state)
        state = functional.silu(inputs)
        return hidden + self.out(state), state

    def first_state(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count, self.state.in_features)


def _estimate(conditional: Tensor, block_size: int) -> LengthEstimate:
    accepted = conditional.cumprod(dim=-1).sum(dim=-1)
    return LengthEstimate(conditional, (1 + accepted) / block_size)
