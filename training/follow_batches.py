"""Batches of on-policy training: a function of seed, round and step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from adaflash.training.batches import MIN_ANSWER_TOKENS, Batch, anchor_range, make_batch
from adaflash.training.features import Text, TextStore
from adaflash.training.follow_config import FollowConfig
from adaflash.training.intake import is_held_out


@dataclass(frozen=True)
class Pool:
    """Texts to draw from; longer answers have more to learn from."""

    store: TextStore
    indices: Sequence[int]
    weights: Sequence[int]

    @classmethod
    def of(cls, store: TextStore, indices: Sequence[int]) -> "Pool":
        weights = [store.trajectories[index].num_answer_tokens for index in indices]
        return cls(store, indices, weights)

    def draw(self, draw: random.Random) -> Text:
        (index,) = draw.choices(self.indices, self.weights)
        return self.store.text(index)


class FollowBatches:
    """Served texts that are not held out, mixed with older ones."""

    def __init__(
        self,
        served: TextStore,
        older: TextStore | None,
        widths: Sequence[int],
        config: FollowConfig,
    ) -> None:
        self._config = config
        self._widths = widths
        self._served = Pool.of(served, split(served, config.held_out_share)[0])
        usable = [] if older is None else _usable(older, config.max_text_tokens)
        self._older = Pool.of(older, usable) if older is not None and usable else None

    def batch(self, number: int, step: int) -> Batch:
        """The batch of a step of the round `number`."""
        config = self._config
        draw = random.Random(f"{config.seed}/{number}/{step}")
        texts = [self._text(draw) for _ in range(config.texts_per_step)]
        width = draw.choice(self._widths)
        anchors = [self._anchors(text, width, draw) for text in texts]
        return make_batch(texts, anchors, width, config.max_text_tokens)

    def _text(self, draw: random.Random) -> Text:
        takes_older = draw.random() < self._config.older_share
        pool = self._older if takes_older and self._older is not None else self._served
        return pool.draw(draw)

    def _anchors(self, text: Text, width: int, draw: random.Random) -> list[int]:
        places = anchor_range(text, self._config.max_text_tokens)
        rejected = text.trajectory.rejected
        chosen = []
        for _ in range(self._config.anchors_per_text):
            place = draw.choice(places)
            if rejected and draw.random() < self._config.reject_share:
                # A block in which the rejected draft is one of the drafts.
                place = draw.choice(rejected) - draw.randrange(1, width)
            chosen.append(min(max(place, places.start), places.stop - 1))
        return sorted(chosen)


def split(store: TextStore, held_out_share: float) -> tuple[list[int], list[int]]:
    """Indices of the texts to learn from, and of those to judge by, oldest first."""
    held_out = [is_held_out(item.name, held_out_share) for item in store.trajectories]
    return (
        [index for index, is_out in enumerate(held_out) if not is_out],
        [index for index, is_out in enumerate(held_out) if is_out],
    )


def _usable(store: TextStore, max_tokens: int) -> list[int]:
    return [
        index
        for index, item in enumerate(store.trajectories)
        if item.num_answer_tokens >= MIN_ANSWER_TOKENS
        and item.prompt_len + MIN_ANSWER_TOKENS <= max_tokens
    ]
