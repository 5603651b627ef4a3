"""A line when drafting stops to pay and when it pays again, and no flood."""

import msgspec
import pytest

from adaflash.engine.messages import EngineFacts, SpeculationFacts, SpeculationStats
from adaflash.server.fake_engine import FACTS
from adaflash.server.speculation_log import QUIET_S, SpeculationLog
from tests.server.test_metrics import STATS

PAUSED = (
    "drafting paused: it does not pay at 5 running requests; "
    "tried again after 64 steps, then more seldom"
)
RESUMED = "drafting resumed at 1 running request"
DRAFTING = msgspec.structs.replace(
    FACTS, speculation=SpeculationFacts(policy="goodput", drafter="d", block_size=8)
)


class Telling:
    """A log, and the time it sees."""

    def __init__(self, facts: EngineFacts = DRAFTING) -> None:
        self.now_s = 0.0
        self.log = SpeculationLog(64, clock=lambda: self.now_s)
        self.log.on_engine_up(facts)

    def step(self, is_paying: bool | None) -> None:
        """None: a step without decoding rows."""
        speculation = None if is_paying is None else SpeculationStats(width=0, is_paying=is_paying)
        self.log.on_step(
            msgspec.structs.replace(
                STATS, num_running=1 if is_paying else 5, speculation=speculation
            )
        )


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="adaflash.server.speculation_log")
    return caplog


def test_changes_are_told_and_nothing_else(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    for is_paying in (True, True, None, False, False, None, False):
        telling.step(is_paying)
    assert lines.messages == [PAUSED]
    telling.now_s += QUIET_S
    for is_paying in (False, True, True):
        telling.step(is_paying)
    assert lines.messages == [PAUSED, RESUMED]


def test_that_it_does_not_pay_from_the_start_is_told(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    telling.step(False)
    assert lines.messages == [PAUSED]


def test_another_engine_starts_anew(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    telling.step(False)
    telling.log.on_engine_down()
    telling.log.on_engine_up(DRAFTING)
    telling.now_s += QUIET_S
    telling.step(True)
    assert lines.messages == [PAUSED]


def test_without_a_drafter_nothing_is_told(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling(FACTS)
    telling.step(False)
    assert lines.messages == []


def test_flapping_is_a_line_per_quiet_time(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    telling.step(True)
    for number in range(1000):
        telling.now_s = number * QUIET_S / 100
        telling.step(number % 2 == 1)
    assert 1 <= len(lines.messages) <= 10


def test_a_change_in_the_quiet_time_is_told_after_it(lines: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    for is_paying in (True, False, True):
        telling.step(is_paying)
    assert lines.messages == [PAUSED]
    telling.now_s += QUIET_S
    telling.step(True)
    assert lines.messages == [PAUSED, RESUMED]
