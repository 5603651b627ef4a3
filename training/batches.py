"""Which blocks a step trains on: a function of seed and step, so that runs can be resumed."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.training.config import FitConfig
from adaflash.training.features import Text, TextStore

MIN_ANSWER_TOKENS = 4
LENGTH_STEP = 128  # tokens; texts of a batch are padded to a multiple


@dataclass(frozen=True)
class Batch:
    """A anchors in each of S texts, texts padded to L tokens."""

    token_ids: Tensor  # [S, L + W] int64, padded with 0
    teacher: Tensor  # [S, L + W] int64, the target's most likely next tokens
    features: Tensor  # [S, L, taps * hidden]
    last: Tensor  # [S, L + W, hidden], the target's last states
    lengths: Tensor  # [S] int64
    anchors: Tensor  # [S, A] int64
    width: int


class BatchMaker:
    """Draws batches from texts whose answers are long enough."""

    def __init__(self, store: TextStore, config: FitConfig) -> None:
        self._store = store
        self._config = config
        self._usable = [
            index
            for index, item in enumerate(store.trajectories)
            if item.num_answer_tokens >= MIN_ANSWER_TOKENS
            and item.prompt_len + MIN_ANSWER_TOKENS <= config.max_text_tokens
        ]
        # Longer answers have more to learn from.
        self._weights = [
            config.domain_weights.get(store.trajectories[index].domain, 1.0)
            * store.trajectories[index].num_answer_tokens
            for index in self._usable
        ]

    def batch(self, step: int) -> Batch:
        draw = random.Random(f"{self._config.seed}/{step}")
        chosen = draw.choices(self._usable, self._weights, k=self._config.texts_per_step)
        texts = [self._store.text(index) for index in chosen]
        width = draw.choice(self._config.drafter.widths)
        return make_batch(
            texts,
            [self._anchors(text, draw) for text in texts],
            width,
            self._config.max_text_tokens,
        )

    def _anchors(self, text: Text, draw: random.Random) -> list[int]:
        places = anchor_range(text, self._config.max_text_tokens)
        return sorted(draw.choices(places, k=self._config.anchors_per_text))


def anchor_range(text: Text, max_tokens: int) -> range:
    """Positions that can be the newest known token: of the answer, with a token behind."""
    end = min(len(text.token_ids), max_tokens)
    return range(text.trajectory.prompt_len, end - 1)


def make_batch(texts: list[Text], anchors: list[list[int]], width: int, max_tokens: int) -> Batch:
    lengths = [min(len(text.token_ids), max_tokens) for text in texts]
    # Few different shapes: libraries keep something for every one they have seen.
    longest = -(-max(lengths) // LENGTH_STEP) * LENGTH_STEP
    shape = (len(texts), longest + width)
    token_ids, teacher = torch.zeros(2, *shape, dtype=torch.int64)
    features, last = (
        torch.zeros(*size, tensor.shape[1], dtype=tensor.dtype)
        for size, tensor in (
            ((len(texts), longest), texts[0].features),
            (shape, texts[0].last),
        )
    )
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        token_ids[row, :length] = text.token_ids[:length]
        teacher[row, :length] = text.teacher[:length]
        features[row, :length] = text.features[:length]
        last[row, :length] = text.last[:length]
    return Batch(
        token_ids, teacher, features, last, torch.tensor(lengths), torch.tensor(anchors), width
    )
