"""Takes up newer versions of the drafter while the engine runs.

CURRENT is looked at about once a second, a new version is read in a thread, and the engine changes
over between two steps, drafter and heads in one instant. A version that is broken, or has another
shape than the drafter that the engine was laid out for, is refused, and the old one stays.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adaflash.engine.errors import CheckpointError
from adaflash.engine.learning.versions import CURRENT, current_version, version_folder
from adaflash.engine.models.drafter import Drafter

LOOK_EVERY_S = 1.0

Load = Callable[[Path], Drafter]  # a checkpoint's folder to a drafter; raises CheckpointError


@dataclass
class ReloadNews:
    """Counts since the last look, and the version in use."""

    version: str | None
    num_reloads: int = 0
    num_refused: int = 0
    problems: list[str] = field(default_factory=list)


class Reloader:
    """Watches the learning folder `folder`. `in_use`: the version that the engine started with."""

    def __init__(
        self, folder: Path, load: Load, swap: Callable[[Drafter], None], in_use: str | None
    ) -> None:
        """swap: changes the engine over; called by `turn`, between two steps."""
        self._folder = folder
        self._load = load
        self._swap = swap
        self._seen: tuple[int, int, int] | None = None  # CURRENT, as it was at the last look
        self._looked_s = -LOOK_EVERY_S
        self._tried = in_use  # the newest version that was taken up or refused
        self._loading: _Loading | None = None
        self._news = ReloadNews(in_use)

    def turn(self) -> None:
        """Between two steps: look, or change over to what has been read. Never waits."""
        if self._loading is not None:
            self._end_loading(self._loading)
            return
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()

    def turn_now(self) -> None:
        """At the start, before the first request: look, read and change over."""
        self._look()
        if self._loading is not None:
            self._loading.thread.join()
            self._end_loading(self._loading)

    def news(self) -> ReloadNews:
        found, self._news = self._news, ReloadNews(self._news.version)
        return found

    def _look(self) -> None:
        try:
            stat = (self._folder / CURRENT).stat()
        except OSError:
            return  # there is no version yet
        mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            version = current_version(self._folder)
        except CheckpointError as error:
            self._refuse(str(error))
            return
        if version is not None and version != self._tried:
            self._tried = version
            self._loading = _Loading(version, version_folder(self._folder, version), self._load)

    def _end_loading(self, loading: "_Loading") -> None:
        if loading.thread.is_alive():
            return
        self._loading = None
        if loading.drafter is None:
            self._refuse(f"version {loading.version} of the drafter is refused: {loading.problem}")
            return
        self._swap(loading.drafter)
        self._news.version = loading.version
        self._news.num_reloads += 1

    def _refuse(self, problem: str) -> None:
        self._news.num_refused += 1
        self._news.problems.append(problem)


class _Loading:
    """A version being read, in a thread, so that the steps go on."""

    def __init__(self, version: str, folder: Path, load: Load) -> None:
        self.version = version
        self.drafter: Drafter | None = None
        self.problem = ""
        self._folder = folder
        self._load = load
        self.thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.drafter = self._load(self._folder)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old one stays
            self.problem = str(error) or type(error).__name__
