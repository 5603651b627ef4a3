"""Checkpoints on disk, under Hugging Face tensor names."""

import json
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.config import ModelConfig, from_hf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Tensors(Protocol):
    """Named tensors on disk."""

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now, in the precision of the file (quantised ones as float32)."""
        ...


class Checkpoint(Tensors, Protocol):
    """The tensors of one target model, under their Hugging Face names."""

    @property
    def config(self) -> ModelConfig: ...


class SafetensorsFolder:
    """The tensors of one or more safetensors files. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        # Memory-mapped: a tensor is read when it is asked for.
        files = [self._open(path) for path in _weight_files(folder)]
        self._file_of = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _open(self, path: Path) -> safe_open:
        try:
            return safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


class SafetensorsCheckpoint(SafetensorsFolder):
    """A Hugging Face folder: config.json and safetensors files."""

    def __init__(self, folder: Path) -> None:
        generation = folder / "generation_config.json"
        self.config = from_hf(
            read_json(folder / "config.json"), read_json(generation) if generation.exists() else {}
        )
        super().__init__(folder)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(
        f"{folder} has no {SINGLE} and no {INDEX}; of a GGUF model, give the .gguf file itself"
    )
