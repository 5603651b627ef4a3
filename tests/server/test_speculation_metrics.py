"""The speculative series: which there are, and what moves them."""

import msgspec
import pytest

from adaflash.engine.messages import (
    DraftedBy,
    NoDraft,
    SpeculationFacts,
    SpeculationStats,
    StepStats,
)
from adaflash.server.fake_engine import FACTS
from adaflash.server.metrics import Metrics
from tests.server.test_metrics import STATS, value

# Histograms by their count.
PROMISED = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_verify_length_count",
    "spec_decode_probes_total",
    "spec_decode_full_width_steps_total",
    "spec_decode_paying",
    "step_draft_seconds_count",
    "step_verify_seconds_count",
    "step_sample_seconds_count",
    "cost_model_predicted_seconds_total",
    "cost_model_observed_seconds_total",
    "cost_model_error_seconds_total",
]
LABELLED = [
    *(("spec_decode_steps_without_draft_total", "reason", reason.value) for reason in NoDraft),
    *(("spec_decode_switches_total", "to", to) for to in ("on", "off")),
    *(("spec_decode_source_draft_tokens_total", "source", s) for s in ("drafter", "lookup")),
    *(("spec_decode_source_accepted_tokens_total", "source", s) for s in ("drafter", "lookup")),
]
BY_POSITION = [
    "spec_decode_num_drafted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_predicted_accepted_tokens_per_pos_total",
]
DRAFTING = SpeculationFacts(
    policy="goodput", drafter="d", head="survival", block_size=8, widths=[4, 8]
)


def step(speculation: SpeculationStats | None) -> StepStats:
    return msgspec.structs.replace(
        STATS, draft_s=0.0003, verify_s=0.004, sample_s=0.002, speculation=speculation
    )


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_series_exists_from_the_start(name: str) -> None:
    assert value(Metrics("m"), name) == 0


@pytest.mark.parametrize(("name", "label", "of"), LABELLED)
def test_so_does_every_known_reason(name: str, label: str, of: str) -> None:
    assert value(Metrics("m"), name, **{label: of}) == 0


@pytest.mark.parametrize("name", BY_POSITION)
def test_positions_and_widths_exist_once_they_are_known(name: str) -> None:
    metrics = Metrics("m")
    metrics.on_engine_up(msgspec.structs.replace(FACTS, speculation=DRAFTING))
    for position in range(7):
        assert value(metrics, name, position=str(position)) == 0
    assert value(metrics, "spec_decode_steps_total", width="8") == 0
    longer = msgspec.structs.replace(DRAFTING, lookup_drafts=12)
    metrics.on_engine_up(msgspec.structs.replace(FACTS, speculation=longer))
    assert value(metrics, name, position="11") == 0


def test_the_set_up_is_told() -> None:
    metrics = Metrics("m")

    def told(**labels: str) -> float | None:
        return metrics.registry.get_sample_value("adaflash_speculation_info", labels)

    metrics.on_engine_up(FACTS)
    assert told(policy="off", drafter="none", head="none", block_size="0", lookup_drafts="0") == 1
    metrics.on_engine_up(msgspec.structs.replace(FACTS, speculation=DRAFTING))
    drafting = {"policy": "goodput", "drafter": "d", "head": "survival", "block_size": "8"}
    assert told(**drafting, lookup_drafts="0") == 1


def test_rows_move_the_counts_by_position() -> None:
    metrics = Metrics("m")
    by_drafter, by_lookup = DraftedBy.DRAFTER, DraftedBy.LOOKUP
    for num_drafts, num_accepted, drafted_by in (
        (3, 2, by_drafter),
        (1, 1, by_lookup),
        (0, 0, None),
        (3, 0, by_lookup),
    ):
        metrics.speculation.on_decode_row(num_drafts, num_accepted, drafted_by)
    for name, by_source in (("draft", (3, 4)), ("accepted", (2, 1))):
        for source, count in zip(("drafter", "lookup"), by_source, strict=True):
            series = f"spec_decode_source_{name}_tokens_total"
            assert value(metrics, series, source=source) == count
    assert value(metrics, "spec_decode_num_drafts_total") == 3
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 7
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 3
    drafted, accepted, _ = BY_POSITION
    assert [value(metrics, drafted, position=str(p)) for p in range(3)] == [3, 2, 2]
    assert [value(metrics, accepted, position=str(p)) for p in range(2)] == [2, 1]
    assert value(metrics, "spec_decode_verify_length_count") == 4
    assert value(metrics, "spec_decode_verify_length_sum") == 7
    assert value(metrics, "spec_decode_verify_length_bucket", le="0.0") == 1
    assert value(metrics, "spec_decode_verify_length_bucket", le="1.0") == 2
    assert value(metrics, "spec_decode_verify_length_bucket", le="16.0") == 4


def test_a_drafting_step_moves_its_series() -> None:
    metrics = Metrics("m")
    speculation = SpeculationStats(
        width=8,
        is_probe=True,
        is_full_width=True,
        is_paying=True,
        predicted_accepted=[1.5, 0.0, 0.25],
        predicted_s=0.006,
        observed_s=0.005,
    )
    for _ in range(2):
        metrics.on_step(step(speculation))
    for name in ("draft", "verify", "sample"):
        assert value(metrics, f"step_{name}_seconds_count") == 2
    assert value(metrics, "step_draft_seconds_bucket", le="0.0005") == 2
    assert value(metrics, "step_verify_seconds_sum") == 0.008
    assert value(metrics, "spec_decode_steps_total", width="8") == 2
    assert value(metrics, "spec_decode_probes_total") == 2
    assert value(metrics, "spec_decode_full_width_steps_total") == 2
    assert value(metrics, "spec_decode_paying") == 1
    _, _, predicted = BY_POSITION
    assert [value(metrics, predicted, position=str(p)) for p in range(3)] == [3, 0, 0.5]
    assert value(metrics, "cost_model_predicted_seconds_total") == 0.012
    assert value(metrics, "cost_model_observed_seconds_total") == 0.01
    assert value(metrics, "cost_model_error_seconds_total") == pytest.approx(0.002)
    for reason in NoDraft:
        assert value(metrics, "spec_decode_steps_without_draft_total", reason=reason) == 0


def test_errors_of_the_cost_model_do_not_cancel() -> None:
    metrics = Metrics("m")
    for predicted_s in (0.004, 0.006):
        metrics.on_step(step(SpeculationStats(width=0, predicted_s=predicted_s, observed_s=0.005)))
    assert value(metrics, "cost_model_error_seconds_total") == pytest.approx(0.002)


@pytest.mark.parametrize("reason", NoDraft)
def test_a_step_without_drafts_says_why(reason: NoDraft) -> None:
    metrics = Metrics("m")
    metrics.on_step(step(SpeculationStats(width=0, no_draft=reason, observed_s=0.005)))
    assert value(metrics, "spec_decode_steps_without_draft_total", reason=reason) == 1
    assert value(metrics, "step_draft_seconds_count") == 0
    assert value(metrics, "step_verify_seconds_count") == 1
    assert value(metrics, "cost_model_observed_seconds_total") == 0  # nothing was predicted


def test_a_step_of_prompts_alone_is_no_decode_step() -> None:
    metrics = Metrics("m")
    metrics.on_step(step(None))
    assert value(metrics, "step_verify_seconds_count") == 1
    assert value(metrics, "step_draft_seconds_count") == 0
    for reason in NoDraft:
        assert value(metrics, "spec_decode_steps_without_draft_total", reason=reason) == 0


def test_an_idle_step_is_not_timed() -> None:
    metrics = Metrics("m")
    idle = msgspec.structs.replace(step(None), num_prefill_tokens=0, num_decode_rows=0)
    metrics.on_step(idle)
    assert value(metrics, "step_verify_seconds_count") == 0


def test_switches_are_changes_within_one_engine_s_life() -> None:
    metrics = Metrics("m")
    drafting = msgspec.structs.replace(FACTS, speculation=DRAFTING)

    def switches() -> tuple[float, float]:
        name = "spec_decode_switches_total"
        return value(metrics, name, to="on"), value(metrics, name, to="off")

    metrics.on_engine_up(drafting)
    assert value(metrics, "spec_decode_paying") == 1  # until it is found not to
    for is_paying in (True, True, False, False, True, False):
        metrics.on_step(step(SpeculationStats(width=0, is_paying=is_paying)))
        metrics.on_step(step(None))  # tells nothing
        assert value(metrics, "spec_decode_paying") == is_paying
    assert switches() == (1, 2)
    metrics.on_engine_down()
    assert value(metrics, "spec_decode_paying") == 0
    metrics.on_engine_up(drafting)
    metrics.on_step(step(SpeculationStats(width=8, is_paying=True)))
    assert switches() == (1, 2)


def test_without_a_drafter_nothing_switches() -> None:
    metrics = Metrics("m")
    metrics.on_engine_up(FACTS)
    metrics.on_step(step(SpeculationStats(width=0, no_draft=NoDraft.OFF)))
    assert value(metrics, "spec_decode_paying") == 0
    assert value(metrics, "spec_decode_switches_total", to="off") == 0
