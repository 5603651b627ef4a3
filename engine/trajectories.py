"""Texts that the target wrote, as token ids in shards on disk. No torch.

A shard is one safetensors file, written under a temporary name and renamed: whoever looks sees a
whole shard or none. Shards of a folder are numbered; readers take them in that order.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from adaflash.engine.errors import CheckpointError

PATTERN = "shard-*.safetensors"


@dataclass(frozen=True)
class Trajectory:
    """One prompt and the target's answer."""

    name: str  # of the prompt, then `#` and which sample of it
    domain: str
    token_ids: tuple[int, ...]  # prompt, then answer
    prompt_len: int  # tokens
    rejected: tuple[int, ...] = ()  # positions at which the server's drafts were rejected
    temperature: float = 0.0  # with which it was written
    seed: int = 0  # of the noise; of no account at temperature 0

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len


def write_shard(folder: Path, trajectories: Sequence[Trajectory], *, first_number: int = 0) -> Path:
    """Write the next shard of the folder; numbers start at `first_number`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max((shard_number(path) for path in folder.glob(PATTERN)), default=-1)
    target = folder / f"shard-{max(newest + 1, first_number):06d}.safetensors"
    save_shard(target, trajectories)
    return target


def save_shard(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one shard, replacing the one that is there. Raises OSError."""
    metadata = {"trajectories": _describe(trajectories)}
    replace_file(path, save(_pack(trajectories), metadata=metadata))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that at every moment the old one is there, or the new one, whole."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def read_shards(folder: Path) -> Iterator[Trajectory]:
    """All trajectories of a folder. Raises CheckpointError for a file that is no shard."""
    for path in sorted(folder.glob(PATTERN)):
        yield from read_shard(path)


def read_shard(path: Path) -> list[Trajectory]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            described = json.loads(file.metadata()["trajectories"])
            tokens, rejected = (file.get_tensor(name).tolist() for name in ("tokens", "rejected"))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    found, token_at, rejected_at = [], 0, 0
    for item in described:
        token_end, rejected_end = token_at + item["tokens"], rejected_at + item["rejected"]
        found.append(
            Trajectory(
                item["name"],
                item["domain"],
                tuple(tokens[token_at:token_end]),
                item["prompt_len"],
                tuple(rejected[rejected_at:rejected_end]),
                item.get("temperature", 0.0),
                item.get("seed", 0),
            )
        )
        token_at, rejected_at = token_end, rejected_end
    return found


def shard_number(path: Path) -> int:
    digits = path.stem.partition("-")[2]
    return int(digits) if digits.isdigit() else -1


def _pack(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[np.int32]]:
    return {
        "tokens": np.array([t for item in trajectories for t in item.token_ids], dtype=np.int32),
        "rejected": np.array([p for item in trajectories for p in item.rejected], dtype=np.int32),
    }


def _describe(trajectories: Sequence[Trajectory]) -> str:
    return json.dumps(
        [
            {
                "name": item.name,
                "domain": item.domain,
                "prompt_len": item.prompt_len,
                "tokens": len(item.token_ids),
                "rejected": len(item.rejected),
                "temperature": item.temperature,
                "seed": item.seed,
            }
            for item in trajectories
        ]
    )
