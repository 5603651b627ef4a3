"""The folder of the kept texts: one writer, bounded by size and age. No torch."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from adaflash.engine.errors import ConfigError
from adaflash.engine.trajectories import PATTERN, Trajectory, shard_number, write_shard

LOCK = ".lock"


class FolderLock:
    """Held by one process at a time; the system lets go of it when that process ends."""

    def __init__(self, folder: Path, owner: str) -> None:
        """owner: what can hold it, for the refusal. Raises ConfigError."""
        try:
            # For the owner alone: the folder holds what users wrote.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = (folder / LOCK).open("w")
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"another {owner} uses {folder}") from None

    def release(self) -> None:
        self._file.close()


class Buffer:
    """Shards of texts, numbered by when they were written (ms): no number is ever used twice."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_age_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """now_s: seconds since 1970. Raises ConfigError."""
        self.folder = folder
        self._lock = FolderLock(folder, "server")
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now_s = now_s
        for scratch in folder.glob(".shard-*"):  # of a writer that was killed
            scratch.unlink(missing_ok=True)
        self.num_bytes = self.bound()

    def write(self, texts: Sequence[Trajectory]) -> None:
        """Add a shard, then keep to the limits. Raises OSError."""
        write_shard(self.folder, texts, first_number=round(self._now_s() * 1000))
        self.num_bytes = self.bound()

    def bound(self) -> int:
        """Delete the oldest shards beyond the limits; returns the bytes of those that stay."""
        shards = []
        for path in sorted(self.folder.glob(PATTERN)):
            with contextlib.suppress(OSError):  # gone by another hand
                shards.append((path, path.stat().st_size))
        total = sum(size for _, size in shards)
        oldest_s = self._now_s() - self._max_age_s
        for path, size in shards:
            if total <= self._max_bytes and shard_number(path) / 1000 >= oldest_s:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                total -= size
        return total

    def close(self) -> None:
        self._lock.release()
