"""Prometheus metrics of speculation: what was drafted and accepted, when, and at what cost.

What requests got is counted with their tokens: a draft is accepted if its token was kept, so one
that lies behind a stop string is drafted, as the target did verify it, and not accepted.
"""

from prometheus_client import CollectorRegistry, Info

from adaflash.engine.messages import (
    DraftedBy,
    NoDraft,
    SpeculationFacts,
    SpeculationStats,
    StepStats,
)
from adaflash.server.series import Series

VERIFY_LENGTHS = (*(float(length) for length in range(17)), 24.0, 32.0)
PART_S = (  # of a step
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.010, 0.012),
    *(0.015, 0.020, 0.025, 0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.200, 0.300, 0.500),
    *(1.0, 2.0, 5.0),
)


class SpeculationMetrics:
    """The speculative series of one server."""

    def __init__(self, registry: CollectorRegistry, series: Series) -> None:
        self._info = Info("adaflash_speculation", "How drafting is set up", registry=registry)
        self._was_paying = False
        self._define_drafts(series)
        self._define_steps(series)
        self._define_costs(series)

    def _define_drafts(self, series: Series) -> None:
        self._drafts = series.counter(
            "spec_decode_num_drafts", "Verifications of at least one draft."
        )
        self._draft_tokens = series.counter(
            "spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self._accepted_tokens = series.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted and kept."
        )
        self._drafts_of = series.counter_by(
            "spec_decode_source_draft_tokens",
            "Draft tokens verified, by where they came from.",
            "source",
            DraftedBy,
        )
        self._accepted_of = series.counter_by(
            "spec_decode_source_accepted_tokens",
            "Draft tokens accepted and kept, by where they came from.",
            "source",
            DraftedBy,
        )
        self._drafted_at = series.counter_by(
            "spec_decode_num_drafted_tokens_per_pos",
            "Draft tokens verified, by their place in the block.",
            "position",
        )
        self._accepted_at = series.counter_by(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted and kept, by their place in the block.",
            "position",
        )
        self._predicted_at = series.counter_by(
            "spec_decode_predicted_accepted_tokens_per_pos",
            "Acceptances that were expected of the draft tokens verified.",
            "position",
        )
        self._verify_length = series.histogram(
            "spec_decode_verify_length",
            "Draft tokens verified for one request in one decode step.",
            VERIFY_LENGTHS,
        )

    def _define_steps(self, series: Series) -> None:
        self._draft_time = series.histogram(
            "step_draft_seconds", "Drafting, in steps that drafted.", PART_S
        )
        self._verify_time = series.histogram(
            "step_verify_seconds", "The target model's part of a step.", PART_S
        )
        self._sample_time = series.histogram(
            "step_sample_seconds", "Choosing tokens and accepting drafts.", PART_S
        )
        self._steps = series.counter_by(
            "spec_decode_steps", "Steps that drafted, by the block size drafted.", "width"
        )
        self._steps_without = series.counter_by(
            "spec_decode_steps_without_draft",
            "Decode steps in which the drafter drafted nothing, by reason.",
            "reason",
            NoDraft,
        )
        self._probes = series.counter(
            "spec_decode_probes", "Steps that drafted only to see whether it pays."
        )
        self._full_width_steps = series.counter(
            "spec_decode_full_width_steps", "Steps that verified whole blocks, for calibration."
        )
        self._paying = series.gauge(
            "spec_decode_paying", "1 while drafting is thought to pay at this load."
        )
        self._switches = series.counter_by(
            "spec_decode_switches", "Changes of whether drafting pays.", "to", ("on", "off")
        )

    def _define_costs(self, series: Series) -> None:
        self._predicted_s = series.counter(
            "cost_model_predicted_seconds", "Time of steps, as the cost model predicted it."
        )
        self._observed_s = series.counter(
            "cost_model_observed_seconds", "Time of the same steps by the clock."
        )
        self._error_s = series.counter(
            "cost_model_error_seconds", "Sum of each step's difference, without its sign."
        )

    def on_engine_up(self, facts: SpeculationFacts) -> None:
        self._info.info(
            {
                "policy": facts.policy,
                "drafter": facts.drafter or "none",
                "head": facts.head or "none",
                "block_size": str(facts.block_size),
                "lookup_drafts": str(facts.lookup_drafts),
            }
        )
        for by_position in (self._drafted_at, self._accepted_at, self._predicted_at):
            by_position.prepare(range(max(facts.block_size - 1, facts.lookup_drafts)))
        self._steps.prepare(facts.widths)
        self._was_paying = facts.drafter is not None  # an engine that can draft starts so
        self._paying.set(self._was_paying)

    def on_engine_down(self) -> None:
        self._paying.set(0)

    def on_step(self, stats: StepStats) -> None:
        """A step that computed something."""
        self._verify_time.observe(stats.verify_s)
        self._sample_time.observe(stats.sample_s)
        if stats.speculation is None:
            return
        self._on_drafting(stats.speculation, stats.draft_s)
        self._on_paying(stats.speculation.is_paying)
        self._on_cost(stats.speculation)

    def on_decode_row(
        self, num_drafts: int, num_accepted: int, drafted_by: DraftedBy | None
    ) -> None:
        """One request's share of a decode step: drafts verified, and accepted tokens kept."""
        self._verify_length.observe(num_drafts)
        if num_drafts == 0:
            return
        self._drafts.inc()
        self._draft_tokens.inc(num_drafts)
        self._accepted_tokens.inc(num_accepted)
        if drafted_by is not None:
            self._drafts_of.of(drafted_by).inc(num_drafts)
            self._accepted_of.of(drafted_by).inc(num_accepted)
        for position in range(num_drafts):
            self._drafted_at.of(position).inc()
        for position in range(num_accepted):
            self._accepted_at.of(position).inc()

    def _on_drafting(self, step: SpeculationStats, draft_s: float) -> None:
        if step.width > 0:
            self._draft_time.observe(draft_s)
            self._steps.of(step.width).inc()
        if step.no_draft is not None:
            self._steps_without.of(step.no_draft).inc()
        if step.is_probe:
            self._probes.inc()
        if step.is_full_width:
            self._full_width_steps.inc()
        for position, expected in enumerate(step.predicted_accepted):
            self._predicted_at.of(position).inc(expected)

    def _on_paying(self, is_paying: bool) -> None:
        if is_paying != self._was_paying:
            self._switches.of("on" if is_paying else "off").inc()
        self._was_paying = is_paying
        self._paying.set(is_paying)

    def _on_cost(self, step: SpeculationStats) -> None:
        if step.predicted_s > 0:
            self._predicted_s.inc(step.predicted_s)
            self._observed_s.inc(step.observed_s)
            self._error_s.inc(abs(step.predicted_s - step.observed_s))
