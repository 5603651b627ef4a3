"""Finds the files of the model and the drafter asked for, and shows how far a download is."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from adaflash.engine.catalog import OnProgress, locate
from adaflash.engine.errors import CheckpointError
from adaflash.server.settings import ServerSettings

MIB = 2**20
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
LINES_PER_DOWNLOAD = 10  # where there is no terminal to draw a bar on


def find_model(settings: ServerSettings) -> Path:
    """Local path of `settings.model`, fetched first if need be. Raises CheckpointError."""
    with _show_progress(f"fetching {settings.model}") as on_progress:
        return locate(settings.model, cache_dir=settings.model_cache_dir, on_progress=on_progress)


def find_drafter(settings: ServerSettings) -> Path | None:
    """Local folder of `settings.drafter`, fetched first if need be; None when there is no use
    for one. Raises CheckpointError.
    """
    if not settings.speculates:
        return None
    drafter = settings.drafter
    path = Path(drafter).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not HUB_ID.fullmatch(drafter):
        problem = "is not a folder" if path.exists() else "was not found"
        raise CheckpointError(
            f"the drafter {drafter!r} {problem}: give the folder of a drafter's checkpoint, a hub "
            "id (org/name), or none"
        )
    with _show_progress(f"fetching {drafter}") as on_progress:
        return locate(drafter, cache_dir=settings.model_cache_dir, on_progress=on_progress)


@contextmanager
def _show_progress(label: str) -> Iterator[OnProgress]:
    """On stderr; nothing shows before the first call, so a model in the cache costs no line."""
    if not sys.stderr.isatty():
        yield _Lines(label).show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class _Lines:
    """A few lines instead of a bar, for logs."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_shown = 0

    def show(self, done: int, total: int | None) -> None:
        reached = done * LINES_PER_DOWNLOAD // total + 1 if total else 1
        if reached > self._num_shown:
            self._num_shown = reached
            of_total = f" of {total / MIB:.0f}" if total else ""
            print(f"{self._label}: {done / MIB:.0f}{of_total} MiB", file=sys.stderr, flush=True)


def served_names(settings: ServerSettings) -> tuple[str, ...]:
    """Names that requests may use for the model, the one shown first."""
    if settings.served_model_name:
        return settings.served_model_name
    path = Path(settings.model).expanduser()
    if not path.exists():
        return (settings.model,)  # a catalog name or hub id
    return (path.resolve().name if path.is_dir() else path.stem,)
