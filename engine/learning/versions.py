"""Versions of a drafter in a learning folder. No torch.

    DIR/buffer/shard-*.safetensors    served texts, written by the server (recorder.py)
    DIR/versions/000001/              a drafter's checkpoint, never changed once it is there
    DIR/CURRENT                       the name of the version in use

A version is written under another name, renamed when it is whole, and only then does CURRENT, which
is replaced by a rename too, name it. So whoever reads CURRENT finds a whole version, at any moment
and after any crash; drafter and heads lie in one file and change together.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from adaflash.engine.errors import CheckpointError
from adaflash.engine.trajectories import replace_file

CURRENT = "CURRENT"
BUFFER = "buffer"
VERSIONS = "versions"
VERSION_NAME = re.compile(r"[0-9]{6,}")


def current_version(folder: Path) -> str | None:
    """The version in use; None before the first. Raises CheckpointError for a bad pointer."""
    try:
        name = (folder / CURRENT).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / CURRENT}: {error}") from error
    if not VERSION_NAME.fullmatch(name):
        raise CheckpointError(f"{folder / CURRENT} names no version: {name[:40]!r}")
    return name


def version_folder(folder: Path, name: str) -> Path:
    return folder / VERSIONS / name


def drafter_name(checkpoint: Path) -> str:
    """For people: the folder's name; of a version, its learning folder's too."""
    if checkpoint.parent.name == VERSIONS:
        return f"{checkpoint.parent.parent.name}/{checkpoint.name}"
    return checkpoint.name


def publish(folder: Path, fill: Callable[[Path], None], *, keep: int) -> str:
    """Make the next version the one in use, and return its name.

    fill: writes the checkpoint into an empty folder. keep: newest versions that stay, the new one
    among them; a server may still be reading the one before.
    """
    versions = folder / VERSIONS
    versions.mkdir(parents=True, exist_ok=True)
    scratch = versions / f".new.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    fill(scratch)
    _sync(scratch)
    name = f"{max((int(known) for known in _names(versions)), default=0) + 1:06d}"
    scratch.rename(versions / name)
    replace_file(folder / CURRENT, name.encode() + b"\n")
    _prune(versions, keep)
    return name


def _names(versions: Path) -> list[str]:
    """Ascending."""
    found = [path.name for path in versions.iterdir() if VERSION_NAME.fullmatch(path.name)]
    return sorted(found, key=int)


def _prune(versions: Path, keep: int) -> None:
    for name in _names(versions)[:-keep]:
        shutil.rmtree(versions / name, ignore_errors=True)
    for path in versions.glob(".new.*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Let the files of a folder reach the disk before anything points to them."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
