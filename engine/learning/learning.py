"""What the engine has of learning: a recorder of texts, a watch on newer drafters, or both."""

import time

from adaflash.engine.learning.recorder import Recorder
from adaflash.engine.learning.reload import Reloader
from adaflash.engine.messages import LearningReport, NotLearnt
from adaflash.engine.types import Request, Sequence

REPORT_EVERY_S = 1.0


class Learning:
    """Told by the engine of its requests; does its own work between steps."""

    def __init__(self, recorder: Recorder | None = None, reloader: Reloader | None = None) -> None:
        self._recorder = recorder
        self._reloader = reloader
        self._reported_s = -REPORT_EVERY_S
        self._newest = LearningReport()

    def begin(self, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.begin(request)

    def rejected(self, request_id: str, position: int) -> None:
        if self._recorder is not None:
            self._recorder.rejected(request_id, position)

    def finish(self, sequence: Sequence) -> None:
        if self._recorder is not None:
            self._recorder.finish(sequence)

    def forget(self, request_id: str) -> None:
        if self._recorder is not None:
            self._recorder.forget(request_id)

    def turn(self) -> LearningReport | None:
        """Between two steps. Returns what is new, at most once a second."""
        if self._reloader is not None:
            self._reloader.turn()
        now_s = time.monotonic()
        if now_s - self._reported_s < REPORT_EVERY_S:
            return None
        self._reported_s = now_s
        return self._report()

    def close(self) -> None:
        """Write what waits."""
        if self._recorder is not None:
            self._recorder.close()

    def _report(self) -> LearningReport | None:
        num_kept, left_out, num_bytes = 0, dict[NotLearnt, int](), 0
        version, num_reloads, num_refused = None, 0, 0
        problems = list[str]()
        if self._recorder is not None:
            texts = self._recorder.news()
            num_kept, left_out, num_bytes = texts.num_kept, texts.num_left_out, texts.buffer_bytes
            problems += texts.problems
        if self._reloader is not None:
            drafters = self._reloader.news()
            version, num_reloads = drafters.version, drafters.num_reloads
            num_refused = drafters.num_refused
            problems += drafters.problems
        report = LearningReport(
            num_kept=num_kept,
            num_left_out=left_out,
            buffer_bytes=num_bytes,
            version=version,
            num_reloads=num_reloads,
            num_refused=num_refused,
            problems=problems,
        )
        states = (report.buffer_bytes, report.version)
        is_news = states != (self._newest.buffer_bytes, self._newest.version)
        self._newest = report
        counts = (num_kept, num_reloads, num_refused, left_out, problems)
        return report if is_news or any(counts) else None
