"""The newest served texts, copied from the server's buffer to where the trainer keeps features.

The server deletes from its buffer when it likes; a copy stays only as long as the original is
there, and a round works on copies that nobody touches while it runs.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.trajectories import PATTERN, Trajectory, read_shard, save_shard
from adaflash.training.batches import MIN_ANSWER_TOKENS
from adaflash.training.features import ensure_features
from adaflash.training.follow_config import FollowConfig


@dataclass(frozen=True)
class ShardSize:
    """What a shard holds of usable texts."""

    num_tokens: int
    num_train: int  # texts to learn from
    num_held_out: int  # texts to judge by


class Intake:
    """Copies of the newest shards, cut to size, in `folder`."""

    def __init__(
        self, buffer: Path, folder: Path, config: FollowConfig, say: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self._buffer = buffer
        self._config = config
        self._say = say
        self._sizes: dict[str, ShardSize] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        """Shards that have been taken in, oldest first."""
        return [path.name for path in sorted(self.folder.glob(PATTERN))]

    def update(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        """Take in what is new and lies in the window, and drop what does not any more."""
        kept, num_tokens = set[str](), 0
        for path in sorted(self._buffer.glob(PATTERN), reverse=True):
            if num_tokens >= self._config.window_tokens:
                break
            num_tokens += self._take(path).num_tokens
            kept.add(path.name)
        for name in set(self.names) - kept:
            self._drop(name)
        for _ in ensure_features(self.folder, decoder, taps):
            pass

    def size(self, names: set[str]) -> ShardSize:
        """Of these shards together, as far as they have been taken in."""
        sizes = [self._sizes[name] for name in names & self._sizes.keys()]
        return ShardSize(
            sum(size.num_tokens for size in sizes),
            sum(size.num_train for size in sizes),
            sum(size.num_held_out for size in sizes),
        )

    def _take(self, path: Path) -> ShardSize:
        """Copy a shard, unless that has been done."""
        known = self._sizes.get(path.name)
        if known is not None:
            return known
        copy = self.folder / path.name
        try:
            texts = read_shard(copy) if copy.exists() else list(self._usable(path))
        except CheckpointError as error:  # deleted just now, or damaged
            self._say(f"left out: {error}")
            texts = []
        if texts and not copy.exists():
            save_shard(copy, texts)
        held_out = sum(is_held_out(text.name, self._config.held_out_share) for text in texts)
        size = ShardSize(sum(len(t.token_ids) for t in texts), len(texts) - held_out, held_out)
        self._sizes[path.name] = size
        return size

    def _usable(self, path: Path) -> Iterator[Trajectory]:
        for text in read_shard(path):
            cut = _cut(text, self._config.max_text_tokens)
            if cut.num_answer_tokens >= MIN_ANSWER_TOKENS:
                yield cut

    def _drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        number = name.removeprefix("shard-").removesuffix(".safetensors")
        for features in self.folder.glob(f"features-*-{number}.safetensors"):
            features.unlink(missing_ok=True)
        self._sizes.pop(name, None)


def is_held_out(name: str, share: float) -> bool:
    """By the prompt alone, so that no answer to a prompt of one side is on the other."""
    prompt = name.partition("#")[0]
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _cut(text: Trajectory, max_tokens: int) -> Trajectory:
    token_ids = text.token_ids[:max_tokens]
    inside = tuple(place for place in text.rejected if place < len(token_ids))
    return replace(text, token_ids=token_ids, rejected=inside)
