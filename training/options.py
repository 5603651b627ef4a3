"""What the training commands have in common: the target, and how many threads."""

import argparse
from pathlib import Path

from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.models.decoder import Decoder


def add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", default=DEFAULT_MODEL, help="catalog name, folder, GGUF file or hub id")
    add("--cache-dir", type=Path, default=Path.home() / ".cache" / "adaflash", help="for models")
    add("--threads", type=int, help="CPU threads; left out: all cores")


def target_path(options: argparse.Namespace) -> Path:
    """Where the target's files are. Raises CheckpointError."""
    return locate(options.target, cache_dir=options.cache_dir, on_progress=lambda *_: None)


def load_target(options: argparse.Namespace) -> Decoder:
    """The target, in the precision that training reads it with. Raises CheckpointError."""
    import torch

    from adaflash.engine.models.weights import load_decoder
    from adaflash.training.objective import has_fast_bfloat16

    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return load_decoder(target_path(options), dtype, torch.device("cpu"))
