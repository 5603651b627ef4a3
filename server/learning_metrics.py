"""Prometheus metrics of learning: texts kept for training, and newer drafters taken up."""

from adaflash.engine.messages import LearningReport, NotLearnt
from adaflash.server.series import Series


class LearningMetrics:
    """The learning series of one server."""

    def __init__(self, series: Series) -> None:
        self._kept = series.counter("learn_kept_texts", "Texts written for training.")
        self._left_out = series.counter_by(
            "learn_left_out_texts", "Texts that were not, by reason.", "reason", NotLearnt
        )
        self._bytes = series.gauge("learn_buffer_bytes", "Size of the texts kept for training.")
        self._number = series.gauge(
            "drafter_version", "Number of the drafter's version; 0: the one from the settings."
        )
        self._reloads = series.counter("drafter_reloads", "Newer drafters taken up.")
        self._refused = series.counter(
            "drafter_versions_refused", "Newer drafters that could not be used."
        )

    def on_engine_down(self) -> None:
        self._number.set(0)

    def on_learning(self, report: LearningReport) -> None:
        self._kept.inc(report.num_kept)
        for reason, count in report.num_left_out.items():
            self._left_out.of(reason).inc(count)
        self._bytes.set(report.buffer_bytes)
        self._number.set(int(report.version or 0))
        self._reloads.inc(report.num_reloads)
        self._refused.inc(report.num_refused)
