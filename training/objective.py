"""From a batch to a loss: what one step of training computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.training.batches import Batch
from adaflash.training.config import Losses
from adaflash.training.forward import BlockBatch, chain_states, denoise
from adaflash.training.losses import (
    cross_entropy,
    hazard_loss,
    mixed_loss,
    reach_chances,
    reached_places,
    reverse_kl,
)

ROWS_STEP = 256  # rows of the LM head


@dataclass(frozen=True)
class TargetEnds:
    """The target's embedding and LM head, frozen; the head cut to the draft vocabulary."""

    embedding: Tensor  # [V, hidden]
    head: Tensor  # [draft vocabulary, hidden]
    column_of: Tensor  # [V] int64, column of a token; len(head) if it has none
    token_ids: Tensor  # [draft vocabulary] int64, token of a column

    @classmethod
    def of(cls, decoder: Decoder, token_ids: Tensor) -> "TargetEnds":
        weight = decoder.head_weight.detach()
        column_of = torch.full((len(weight),), len(token_ids))
        column_of[token_ids] = torch.arange(len(token_ids))
        return cls(decoder.embed_tokens.weight.detach(), weight[token_ids], column_of, token_ids)


@dataclass(frozen=True)
class Blocks:
    """B drafted blocks with K = W - 1 places, and the text that they should have guessed."""

    hidden: Tensor  # [B, W, hidden]
    tokens: Tensor  # [B, W] int64, the text from the anchor on
    teacher: Tensor  # [B, K] int64, the target's most likely token at each place
    last: Tensor  # [B, K, hidden], the target's state that chooses the token of each place
    valid: Tensor  # [B, K] bool, places inside the text


@dataclass(frozen=True)
class Figures:
    """What a step showed, for the log."""

    loss: float
    cross_entropy: float
    head_loss: float
    accepted: float  # drafts of a block that were right, expected, of whole blocks


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies it."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


@contextmanager
def mixed_precision() -> Iterator[None]:
    """bfloat16 where the CPU multiplies it; float32 elsewhere."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_fast_bfloat16()):
        yield


def draft(drafter: Drafter, ends: TargetEnds, batch: Batch) -> Blocks:
    """Denoise all blocks of a batch."""
    places = batch.anchors[..., None] + torch.arange(batch.width)  # [S, A, W]
    tokens = _gather(batch.token_ids, places)
    hidden = denoise(
        drafter,
        _mask_of(drafter, ends),
        BlockBatch(
            batch.features,
            batch.lengths,
            batch.anchors,
            ends.embedding[tokens[..., 0]],
            batch.width,
        ),
    )
    before = places[..., :-1]
    rows = torch.arange(len(before))[:, None, None]
    return Blocks(
        hidden=hidden.flatten(0, 1),
        tokens=tokens.flatten(0, 1),
        teacher=_gather(batch.teacher, before).flatten(0, 1),
        last=batch.last[rows, before].flatten(0, 1),
        valid=(places[..., 1:] < batch.lengths[:, None, None]).flatten(0, 1),
    )


def training_loss(
    drafter: Drafter, ends: TargetEnds, batch: Batch, losses: Losses, generator: torch.Generator
) -> tuple[Tensor, Figures]:
    """The loss of one batch, with gradients."""
    assert drafter.survival_head is not None
    with mixed_precision():
        blocks = draft(drafter, ends, batch)
        states = chain_states(drafter, blocks.hidden, ends.embedding[blocks.tokens[:, :-1]])
    head_logits = drafter.survival_head(blocks.hidden.detach())
    survival = head_logits.detach().sigmoid().cumprod(dim=1)
    chances = reach_chances(survival, losses.gamma, losses.explore)
    # One draw a block, so that what is seen of it is a prefix.
    drawn = torch.rand(len(chances), 1, generator=generator) < chances
    seen = drawn & blocks.valid
    with mixed_precision():
        logits = _logits(states[seen], ends.head)
    labels = ends.column_of[blocks.teacher[seen]]
    known = labels < len(ends.head)
    ce = cross_entropy(logits[known], labels[known])
    kl = ce.new_zeros(len(ce))
    if losses.reverse_kl > 0:
        with torch.no_grad(), mixed_precision():
            teacher_logits = functional.linear(blocks.last[seen][known], ends.head)
        kl = reverse_kl(logits[known], teacher_logits)
    draft_loss = mixed_loss(ce, kl, losses.reverse_kl, losses.clip)
    matches = torch.zeros_like(seen)
    matches[seen] = logits.argmax(-1) == ends.column_of[blocks.tokens[:, 1:][seen]]
    head_loss = hazard_loss(head_logits, matches, seen)
    loss = draft_loss + losses.head * head_loss
    accepted = (reached_places(matches) & matches) / chances
    figures = Figures(
        float(loss.detach()),
        float(ce.detach().mean()),
        float(head_loss.detach()),
        float(accepted.sum(dim=1).mean()),
    )
    return loss, figures


def _logits(states: Tensor, head: Tensor) -> Tensor:
    """states: [N, hidden]. The N rows are padded, so that there are few different shapes."""
    padding = -len(states) % ROWS_STEP
    return functional.linear(functional.pad(states, (0, 0, 0, padding)), head)[: len(states)]


def _mask_of(drafter: Drafter, ends: TargetEnds) -> Tensor:
    token_id = drafter.config.mask_token_id
    return drafter.mask_embedding if token_id is None else ends.embedding[token_id]


def _gather(values: Tensor, places: Tensor) -> Tensor:
    """values: [S, T]; places: [S, A, n]. Returns [S, A, n]."""
    return values.gather(1, places.flatten(1)).view_as(places)
