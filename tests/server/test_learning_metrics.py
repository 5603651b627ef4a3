"""Reports of learning move their series and are told in the log."""

import logging

import pytest

from adaflash.engine.messages import LearningReport, NotLearnt
from adaflash.server.metrics import Metrics
from adaflash.server.speculation_log import SpeculationLog

REPORT = LearningReport(
    num_kept=3,
    num_left_out={NotLearnt.OPT_OUT: 2, NotLearnt.QUEUE_FULL: 1},
    buffer_bytes=4096,
    version="000012",
    num_reloads=1,
    num_refused=1,
    problems=["version 000011 of the drafter is refused: it is torn"],
)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"adaflash_{name}", {"model_name": "m", **labels})
    assert found is not None, name
    return found


def test_reports_add_up() -> None:
    metrics = Metrics("m")
    for reason in NotLearnt:
        assert value(metrics, "learn_left_out_texts_total", reason=reason) == 0
    for _ in range(2):
        metrics.on_learning(REPORT)
    assert value(metrics, "learn_kept_texts_total") == 6
    assert value(metrics, "learn_left_out_texts_total", reason="opt_out") == 4
    assert value(metrics, "learn_left_out_texts_total", reason="queue_full") == 2
    assert value(metrics, "learn_buffer_bytes") == 4096
    assert value(metrics, "drafter_version") == 12
    assert value(metrics, "drafter_reloads_total") == 2
    assert value(metrics, "drafter_versions_refused_total") == 2
    metrics.on_engine_down()
    assert value(metrics, "drafter_version") == 0
    assert value(metrics, "drafter_reloads_total") == 2


def test_what_happened_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = SpeculationLog(64)
    with caplog.at_level(logging.INFO):
        log.on_learning(REPORT)
        log.on_learning(LearningReport(num_kept=1))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "000011 of the drafter is refused: it is torn" in caplog.text
    assert "drafting goes on with version 000012" in caplog.text
