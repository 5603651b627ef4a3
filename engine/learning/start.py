"""From the settings to what the engine has of learning."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaflash.engine.config import EngineConfig, LearnConfig
from adaflash.engine.errors import CheckpointError
from adaflash.engine.learning.buffer import Buffer
from adaflash.engine.learning.learning import Learning
from adaflash.engine.learning.recorder import Recorder
from adaflash.engine.learning.redaction import find_hook
from adaflash.engine.learning.reload import Reloader
from adaflash.engine.learning.versions import BUFFER, current_version, version_folder
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.weights import load_drafter

MIB = 2**20
HOUR_S = 3600.0


@dataclass(frozen=True)
class DrafterFiles:
    """Where the drafter is, and where newer ones will be."""

    checkpoint: Path | None = None  # to start with; None: there is none
    watched: Path | None = None  # a learning folder
    version: str | None = None  # of `watched`, if that is what it starts with


def find_drafter_files(config: EngineConfig) -> DrafterFiles:
    """Either path of the settings may be a learning folder. Raises CheckpointError."""
    given = None if config.drafter_path is None else Path(config.drafter_path)
    learn = None if config.learn is None else Path(config.learn.folder)
    given_version = None if given is None else current_version(given)
    watched = learn if learn is not None else given if given_version is not None else None
    if given is not None and given_version is None:
        return DrafterFiles(given, watched)
    source = learn if given is None else given
    version = None if source is None else current_version(source)
    if source is None or version is None:
        return DrafterFiles(None, watched)
    checkpoint = version_folder(source, version)
    return DrafterFiles(checkpoint, watched, version if source == watched else None)


def start_recorder(config: LearnConfig) -> Recorder:
    """Raises ConfigError."""
    redact = None if config.redact is None else find_hook(config.redact)
    buffer = Buffer(
        Path(config.folder) / BUFFER,
        max_bytes=round(config.max_mib * MIB),
        max_age_s=config.max_age_h * HOUR_S,
    )
    return Recorder(buffer, rate=config.rate, redact=redact)


@dataclass(frozen=True)
class Served:
    """What the engine was laid out for, and how it changes over to another drafter."""

    target: ModelConfig
    drafter: Drafter
    dtype: torch.dtype
    device: torch.device
    change_over: Callable[[Drafter], None]


def start_learning(
    config: EngineConfig, files: DrafterFiles, served: Served | None = None
) -> Learning:
    """served: None without a drafter. Raises ConfigError."""
    recorder = None if config.learn is None else start_recorder(config.learn)
    reloader = None
    if served is not None and files.watched is not None:
        reloader = Reloader(files.watched, _loader(served), served.change_over, files.version)
        reloader.turn_now()
    return Learning(recorder, reloader)


def _loader(served: Served) -> Callable[[Path], Drafter]:
    shape = _shape_of(served.drafter)

    def load(folder: Path) -> Drafter:
        drafter = load_drafter(folder, served.target, served.dtype, served.device)
        if _shape_of(drafter) != shape:
            raise CheckpointError(f"{folder} has another shape than the drafter in use")
        if not all(bool(tensor.isfinite().all()) for tensor in drafter.parameters()):
            raise CheckpointError(f"{folder} has weights that are no numbers")
        return drafter

    return load


def _shape_of(drafter: Drafter) -> tuple[object, ...]:
    """All that pages, widths and measured costs depend on."""
    sizes = [(name, tuple(tensor.shape)) for name, tensor in drafter.named_parameters()]
    vocabulary: Tensor | None = drafter.token_ids
    return (drafter.config, sorted(sizes), None if vocabulary is None else len(vocabulary))
