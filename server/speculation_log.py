"""Logs when drafting stops to pay and when it pays again, and what becomes of learning."""

import logging
import math
import time
from collections.abc import Callable

from adaflash.engine.messages import EngineFacts, LearningReport, StepStats

log = logging.getLogger(__name__)

QUIET_S = 10.0  # between two lines, however often the state changes


class SpeculationLog:
    """See EngineObserver. A change within the quiet time is logged after it, if it lasts."""

    def __init__(self, probe_every: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe_every = probe_every
        self._clock = clock
        self._logged = False  # the state that readers of the log know
        self._logged_s = -math.inf

    def on_engine_up(self, facts: EngineFacts) -> None:
        self._logged = facts.speculation.drafter is not None  # an engine that can draft starts so

    def on_engine_down(self) -> None:
        """The next engine starts anew."""

    def on_step(self, stats: StepStats) -> None:
        if stats.speculation is None or stats.speculation.is_paying == self._logged:
            return
        is_paying, now = stats.speculation.is_paying, self._clock()
        if now - self._logged_s >= QUIET_S:
            self._logged, self._logged_s = is_paying, now
            self._write(is_paying, stats.num_running)

    def on_learning(self, report: LearningReport) -> None:
        for problem in report.problems:
            log.warning("%s", problem)
        if report.num_reloads:
            log.info("drafting goes on with version %s of the drafter", report.version)

    def _write(self, is_paying: bool, num_running: int) -> None:
        requests = f"{num_running} running request{'' if num_running == 1 else 's'}"
        if is_paying:
            log.info("drafting resumed at %s", requests)
            return
        log.info(
            "drafting paused: it does not pay at %s; tried again after %d steps, then more seldom",
            requests,
            self._probe_every,
        )
