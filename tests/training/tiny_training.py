"""Texts of the tiny model, and its features, in memory."""

from pathlib import Path

import torch

from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.weights import load_decoder
from adaflash.engine.trajectories import Trajectory, write_shard
from adaflash.training.features import TextStore, ensure_features
from tests.tiny_model import VOCAB, write_tiny_model

TAPS = (0, 1)


def tiny_decoder(folder: Path) -> Decoder:
    return load_decoder(write_tiny_model(folder / "model"), torch.float32, torch.device("cpu"))


def random_texts(count: int, *, seed: int = 0) -> list[Trajectory]:
    """Of unlike lengths; not what the model would write."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for number in range(count):
        length = 14 + 5 * (number % 4)
        token_ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        domain = ("maths", "chat")[number % 2]
        texts.append(Trajectory(f"t{number}", domain, tuple(token_ids), 4 + number % 3))
    return texts


def store_of(folder: Path, decoder: Decoder, texts: list[Trajectory]) -> TextStore:
    if not folder.exists():
        write_shard(folder, texts)
    for _ in ensure_features(folder, decoder, TAPS):
        pass
    return TextStore([folder], TAPS)
