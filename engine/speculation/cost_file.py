"""Keeps measured costs from one start to the next. No torch."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from adaflash.engine.speculation.costs import CostModel, load_costs

SAVE_EVERY_S = 60.0


class KeptCosts:
    """A cost model and its file. `key` spells out what it holds for: model, drafter, machine."""

    def __init__(self, folder: Path | None, key: str, measure: Callable[[], CostModel]) -> None:
        """Read the file in `folder`, or measure and write it. None: measure, and keep nothing."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        self._path = folder / f"{digest}.json" if folder is not None else None
        self._key = key
        self._saved_s = time.monotonic()
        known = load_costs(self._path, key) if self._path is not None else None
        self.costs = known or measure()
        if known is None:
            self._save()

    def save_if_due(self) -> None:
        """What was learnt while serving, now and then."""
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self._save()

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError):  # without the file the next start measures again
                self.costs.save(self._path, self._key)
