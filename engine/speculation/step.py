"""One step of the engine. Plain decoding is this step with no drafts."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.messages import DraftedBy, SpeculationStats, TokenDelta
from adaflash.engine.sampler import Choice, ChoiceRow
from adaflash.engine.speculation.accept import count_accepted
from adaflash.engine.speculation.budget import (
    NO_BLOCKS,
    Allotment,
    Budget,
    Estimate,
    Order,
    context_of,
)
from adaflash.engine.speculation.costs import StepWork
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.target import Verified
from adaflash.engine.types import Row, StepPlan


class Target(Protocol):
    """What the step needs of the target model; see engine/target.py."""

    def verify(self, rows: Many[VerifyRow]) -> Verified: ...


class Chooser(Protocol):
    """What the step needs of the sampler; see engine/sampler.py."""

    def choose(self, logits: Tensor, rows: Many[ChoiceRow]) -> list[Choice]: ...


@dataclass(frozen=True)
class Block:
    """What a draft source thinks of R requests: a state for the newest token and each draft."""

    rows: tuple[Row, ...]
    hidden: Tensor  # [R, width, hidden]


class DraftSource(Protocol):
    """Where drafts come from; see speculation/block_drafter.py."""

    def denoise(self, rows: Many[Row], width: int) -> Block:
        """Think of blocks of `width`, the newest known token included."""
        ...

    def estimate(self, block: Block) -> Estimate:
        """How far each block will be accepted, before any token of it is chosen."""
        ...

    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        """The first `lengths[r]` drafts of each block."""
        ...

    def observe(self, verified: Verified) -> None:
        """Learn of the tokens that the target has just computed."""
        ...


@dataclass(frozen=True)
class StepParts:
    target: Target
    chooser: Chooser
    budget: Budget
    drafter: DraftSource | None = None  # None: the budget's policy never drafts
    lookup: Lookup | None = None  # None: known text is not looked at


@dataclass(frozen=True)
class Outcome:
    """What a row emitted: the target's own choices; none while a prompt is being prefilled."""

    row: Row
    emitted: Many[Choice] = ()
    num_drafts: int = 0  # verified
    num_accepted: int = 0  # of `emitted`, the leading ones that were drafts
    drafted_by: DraftedBy | None = None  # None without drafts


@dataclass(frozen=True)
class StepResult:
    deltas: list[TokenDelta]
    work: StepWork
    speculation: SpeculationStats | None  # None without decoding rows


Commit = Callable[[Outcome], TokenDelta | None]


def speculative_step(plan: StepPlan, parts: StepParts, commit: Commit) -> StepResult:
    """Guess, draft, estimate, allot, propose, verify, choose, accept, commit, learn."""
    drafter, lookup, budget, clock = parts.drafter, parts.lookup, parts.budget, _Clock()
    guesses = lookup.guess(plan.decoding) if lookup is not None else None  # no pass: known text
    order = budget.order(plan, guesses)  # whom to draft, and how wide; width 0: nobody
    block, estimate, drafts = None, NO_BLOCKS, list[tuple[int, ...]]()
    if drafter is not None and order.width > 0:
        block = drafter.denoise(order.rows, order.width)  # one pass, all positions at once
        estimate = drafter.estimate(block)  # from hidden states alone
    allotment = budget.allot(order, estimate)  # one budget for all requests and both sources
    if drafter is not None and block is not None:
        drafts = drafter.propose(block, allotment.lengths.tolist())  # LM head on these rows only
    rows = _with_drafts(plan, order, allotment, drafts)
    draft_s = clock.lap()
    verified = parts.target.verify(rows)  # one ragged causal pass; prefill chunks ride along
    if drafter is not None:
        drafter.observe(verified)
    verify_s = clock.lap()
    choices = iter(parts.chooser.choose(verified.logits, _choice_rows(rows)))
    outcomes = [_accept(row, choices) for row in rows]  # emitted: the target's own choices
    sample_s = clock.lap()
    work = _work_of(rows, order, draft_s, verify_s, sample_s)
    learnt = _learn(budget, order, allotment, outcomes, work) if plan.decoding else None
    if lookup is not None and guesses is not None:
        lookup.learn(guesses, _emitted_by(plan.decoding, outcomes))
    deltas = [commit(outcome) for outcome in outcomes]  # lengths move here and nowhere else
    return StepResult([delta for delta in deltas if delta is not None], work, learnt)


def _with_drafts(
    plan: StepPlan, order: Order, allotment: Allotment, drafts: list[tuple[int, ...]]
) -> list[VerifyRow]:
    """The plan's rows, with what is to be verified of blocks and guesses."""
    blocks = dict(zip(order.rows, drafts, strict=True)) if drafts else {}
    guesses = order.load.guesses
    guessed = guesses.drafts(allotment.guess_lengths) if guesses is not None else {}
    return [_verify_row(row, blocks.get(row, ()), guessed.get(row, ())) for row in plan.rows]


def _verify_row(row: Row, block: tuple[int, ...], guess: tuple[int, ...]) -> VerifyRow:
    assert not (block and guess), "two drafts for one place"
    if guess:
        return VerifyRow(row, guess, DraftedBy.LOOKUP)
    return VerifyRow(row, block, DraftedBy.DRAFTER if block else None)


def _emitted_by(rows: Many[Row], outcomes: list[Outcome]) -> list[list[int]]:
    """Token ids that each of the rows emitted."""
    emitted = {outcome.row: outcome.emitted for outcome in outcomes}
    return [[choice.token_id for choice in emitted[row]] for row in rows]


def _choice_rows(rows: list[VerifyRow]) -> list[ChoiceRow]:
    """The positions at which the target chooses, each with the drafts before it."""
    return [
        ChoiceRow(row.row.sequence, row.drafts[:count])
        for row in rows
        for count in range(row.num_logits)
    ]


def _accept(row: VerifyRow, choices: Iterator[Choice]) -> Outcome:
    """Keep the choices behind drafts that were right, and the one that ends the run."""
    own = [next(choices) for _ in range(row.num_logits)]
    if not own:
        return Outcome(row.row)
    accepted = count_accepted([choice.token_id for choice in own], row.drafts)
    return Outcome(row.row, own[: accepted + 1], len(row.drafts), accepted, row.drafted_by)


def _work_of(
    rows: list[VerifyRow], order: Order, draft_s: float, verify_s: float, sample_s: float
) -> StepWork:
    return StepWork(
        block_rows=len(order.rows) * order.width,
        num_drafts=sum(len(row.drafts) for row in rows),
        num_looked_up=sum(len(row.drafts) for row in rows if row.drafted_by is DraftedBy.LOOKUP),
        num_tokens=sum(row.num_tokens for row in rows),
        num_choices=sum(row.num_logits for row in rows),
        context_tokens=context_of([row.row for row in rows]),
        block_context_tokens=context_of(order.rows),
        draft_s=draft_s,
        verify_s=verify_s,
        sample_s=sample_s,
    )


def _learn(
    budget: Budget,
    order: Order,
    allotment: Allotment,
    outcomes: list[Outcome],
    work: StepWork,
) -> SpeculationStats:
    accepted_of = {outcome.row: outcome.num_accepted for outcome in outcomes}
    return budget.learn(order, allotment, [accepted_of[row] for row in order.rows], work)


@dataclass
class _Clock:
    """A stopwatch."""

    _since: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before
