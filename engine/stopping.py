"""When a request ends. No tensors."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from adaflash.engine.types import FinishReason, Sequence


@dataclass(frozen=True)
class ModelLimits:
    """What holds for every request to this model."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int  # tokens, prompt and output together


@dataclass(frozen=True)
class Ending:
    """How many of the emitted tokens belong to the request, and why it ended, if it did."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # a requested stop token; None for end-of-sequence


def tokens_left(sequence: Sequence, limits: ModelLimits) -> int:
    """Tokens that the request may still get; at least 1 while it runs."""
    return min(
        sequence.request.sampling.max_tokens - sequence.num_output_tokens,
        limits.max_model_len - len(sequence.token_ids),
    )


def find_ending(sequence: Sequence, emitted: Many[int], limits: ModelLimits) -> Ending:
    """Walk over newly emitted tokens (not yet in `sequence`) to the first that ends the request.

    The ending token counts; what was emitted behind it does not.
    """
    params = sequence.request.sampling
    eos = frozenset[int]() if params.ignore_eos else limits.eos_token_ids
    room = tokens_left(sequence, limits)
    for count, token in enumerate(emitted, start=1):
        if token in params.stop_token_ids:
            return Ending(count, FinishReason.STOP, stop_token_id=token)
        if token in eos:
            return Ending(count, FinishReason.STOP)
        if count >= room:
            return Ending(count, FinishReason.LENGTH)
    return Ending(len(emitted))
