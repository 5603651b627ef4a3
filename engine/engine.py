"""The engine: token ids in, token ids out. It knows nothing of text, HTTP or processes."""

import time
from collections.abc import Callable
from dataclasses import replace

from adaflash.engine.learning.learning import Learning
from adaflash.engine.messages import DraftedBy, LearningReport, StepReport, StepStats, TokenDelta
from adaflash.engine.pages import PagePool
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.speculation.budget import Budget
from adaflash.engine.speculation.costs import StepWork
from adaflash.engine.speculation.step import Outcome, StepParts, StepResult, speculative_step
from adaflash.engine.stopping import Ending, ModelLimits, find_ending
from adaflash.engine.types import FinishReason, Request, RowKind, Sequence

IDLE = StepResult([], StepWork(), None)


class Engine:
    """Continuous batching over one target model, with or without drafts.

    Every added request ends in exactly one delta with a finish reason.
    """

    def __init__(
        self,
        pool: PagePool,
        scheduler: Scheduler,
        parts: StepParts,
        limits: ModelLimits,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """on_rest: for what can wait until there is no work; see `rest`."""
        self.learning = Learning()
        self._pool = pool
        self._scheduler = scheduler
        self._parts = parts
        self._limits = limits
        self._on_rest = on_rest
        self._endings: list[TokenDelta] = []  # of requests that ended outside a step

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._endings)

    def add(self, request: Request) -> None:
        """Take a request in. One that cannot be served ends in the next step, with an error."""
        error = self._refusal(request)
        if error is None:
            self._scheduler.add(request)
            self.learning.begin(request)
        else:
            self._end(request.request_id, FinishReason.ERROR, error)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown and ended ids are ignored."""
        sequence = self._scheduler.find(request_id)
        if sequence is not None:
            self._scheduler.finish(sequence)
            self._remember(sequence)
            self.learning.forget(request_id)
            self._end(request_id, FinishReason.ABORT)

    def step(self) -> StepReport:
        """Plan, run, settle."""
        started = time.perf_counter()
        queries, hits = self._scheduler.num_prefix_queries, self._scheduler.num_prefix_hits
        plan = self._scheduler.schedule(expected_drafts=self._parts.budget.expected_drafts)
        result = speculative_step(plan, self._parts, self._commit) if plan.rows else IDLE
        deltas = self._endings + result.deltas
        self._endings = []
        prefill = sum(row.num_tokens for row in plan.rows if row.kind is RowKind.PREFILL)
        return StepReport(
            deltas,
            StepStats(
                step_s=time.perf_counter() - started,
                num_prefill_tokens=prefill,
                num_decode_rows=len(plan.decoding),
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_pages_used=self._pool.num_held,
                num_pages=self._pool.num_pages,
                num_prefix_queries=self._scheduler.num_prefix_queries - queries,
                num_prefix_hits=self._scheduler.num_prefix_hits - hits,
                num_preempted=len(plan.preempted),
                num_draft_tokens=result.work.num_drafts,
                draft_s=result.work.draft_s,
                verify_s=result.work.verify_s,
                sample_s=result.work.sample_s,
                speculation=result.speculation,
            ),
        )

    def rest(self) -> None:
        """There is no work just now."""
        self._on_rest()

    def turn(self) -> LearningReport | None:
        """Between two steps, and while there are none: a newer drafter may be taken up."""
        return self.learning.turn()

    def close(self) -> None:
        """The process ends; may be called from any thread."""
        self.learning.close()

    def change_budget(self, budget: Budget) -> None:
        """Between two steps: the drafter is another one, and nothing is known of it yet.

        Pages made with the old one are shared no more: their context would cost acceptance.
        """
        self._parts = replace(self._parts, budget=budget)
        self._pool.forget()

    def check_integrity(self) -> None:
        """Assert the scheduler's and the pages' invariants."""
        self._scheduler.check_integrity()

    def _commit(self, outcome: Outcome) -> TokenDelta | None:
        """Move the sequence on, and end its request with its last token. None: nothing emitted."""
        sequence = outcome.row.sequence
        first = sequence.num_output_tokens == 0
        emitted = [choice.token_id for choice in outcome.emitted]
        if outcome.num_accepted < outcome.num_drafts and outcome.drafted_by is DraftedBy.DRAFTER:
            wrong = outcome.row.start + outcome.num_accepted + 1
            self.learning.rejected(sequence.request.request_id, wrong)
        ending = find_ending(sequence, emitted, self._limits)
        self._scheduler.commit(outcome.row, emitted[: ending.num_tokens])
        if ending.finish_reason is not None:
            self._scheduler.finish(sequence)
            self._remember(sequence)
            self.learning.finish(sequence)
        return _delta(sequence, outcome, ending, first=first) if emitted else None

    def _remember(self, sequence: Sequence) -> None:
        """What was written may be written again; aborted replies too: a stop string aborts."""
        if self._parts.lookup is not None:
            self._parts.lookup.remember(sequence)

    def _refusal(self, request: Request) -> str | None:
        """Why the request cannot be served. The server checks first; this is the second lock."""
        length = len(request.prompt_ids)
        if length == 0:
            return "the prompt is empty"
        if length >= self._limits.max_model_len:
            return f"the prompt of {length} tokens fills the context"
        if not all(0 <= token < self._limits.vocab_size for token in request.prompt_ids):
            return f"the prompt has a token beyond the vocabulary of {self._limits.vocab_size}"
        return None

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        self._endings.append(TokenDelta(request_id=request_id, finish_reason=reason, error=error))


def _delta(sequence: Sequence, outcome: Outcome, ending: Ending, *, first: bool) -> TokenDelta:
    kept = outcome.emitted[: ending.num_tokens]
    logprobs = [choice.logprobs for choice in kept if choice.logprobs is not None]
    assert sequence.first_scheduled_s is not None
    return TokenDelta(
        request_id=sequence.request.request_id,
        token_ids=[choice.token_id for choice in kept],
        logprobs=logprobs or None,
        finish_reason=ending.finish_reason,
        stop_token_id=ending.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens if first else None,
        queue_s=sequence.first_scheduled_s - sequence.request.arrival_s if first else None,
        num_drafts=outcome.num_drafts if outcome.row.kind is RowKind.VERIFY else None,
        # What follows the request's end was drafted and right, and is for nobody.
        num_accepted=min(outcome.num_accepted, ending.num_tokens),
        drafted_by=outcome.drafted_by,
    )
