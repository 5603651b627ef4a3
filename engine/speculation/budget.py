"""How many drafts of each request a step verifies. No torch.

The joint optimum of `goodput`: of all drafts in the batch the most likely to survive go first (a
draft never survives its predecessor, so what is taken of a block is always a prefix), and their
number is the one with the most expected tokens per second. It is the best over all numbers, not the
first local one, because real costs are staircases.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from adaflash.engine.messages import NoDraft, SpeculationStats
from adaflash.engine.speculation.calibration import Bools, Calibration, Floats, Ints
from adaflash.engine.speculation.costs import PROBE_RATE, RATE, CostModel, StepWork
from adaflash.engine.speculation.suffixes import Match
from adaflash.engine.stopping import ModelLimits, tokens_left
from adaflash.engine.types import Row, StepPlan

LEARN_EVERY = 4  # steps without drafts; one of them corrects the cost model


@dataclass(frozen=True)
class Estimate:
    """A length head's opinion of R blocks with J drafts each."""

    conditional: Floats  # [R, J], P(draft accepted | all before it were)
    ratio: Floats  # [R], expected share of a whole block, the newest known token included


NO_BLOCKS = Estimate(np.zeros((0, 0)), np.zeros(0))


@dataclass(frozen=True)
class Guesses:
    """How N decoding rows may go on, going by text that is known; see speculation/lookup.py."""

    rows: tuple[Row, ...]
    matches: tuple[Match | None, ...]  # a continuation for each row; None: nothing like it is known
    conditional: Floats  # [N, J], P(draft right | all before it are); 0 beyond a continuation

    def drafts(self, lengths: Ints) -> dict[Row, tuple[int, ...]]:
        """The first `lengths[n]` tokens of each continuation, where there is one."""
        all_rows = zip(self.rows, self.matches, lengths.tolist(), strict=True)
        return {row: match.continuation[:count] for row, match, count in all_rows if match}


@dataclass(frozen=True)
class Load:
    """What a step has to do anyway, and what it could draft besides."""

    rows: tuple[Row, ...]  # the decoding ones
    caps: tuple[int, ...]  # drafts that each of them could use
    num_tokens: int  # that the target computes without drafts, prefill included
    room: int  # drafts that the step's token limit allows
    guesses: Guesses | None = None  # of the same rows

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def context_tokens(self) -> int:
        return int(self.contexts.sum())

    @property
    def has_prefill(self) -> bool:
        return self.num_tokens > len(self.rows)

    @cached_property
    def contexts(self) -> Ints:
        """Tokens of context that each row reads [R]."""
        return np.array([row.start + row.num_tokens for row in self.rows], dtype=np.int64)

    @cached_property
    def open_slots(self) -> Ints:
        """Draft slots of each row [R]; none where there is no use for drafts."""
        pairs = zip(self.rows, self.caps, strict=True)
        return np.array([row.draft_slots if cap > 0 else 0 for row, cap in pairs], dtype=np.int64)

    @cached_property
    def promises(self) -> Floats:
        """Survival of each row's guess as far as the row can use it [N, J]; 0 beyond."""
        if self.guesses is None:
            return np.zeros((self.num_rows, 0))
        survival = np.cumprod(self.guesses.conditional, axis=1, dtype=np.float64)
        return usable(survival, self.caps)

    @cached_property
    def matched(self) -> Ints:
        """Tokens of each row's match [N]; 0 where there is none."""
        matches = self.guesses.matches if self.guesses is not None else (None,) * self.num_rows
        return np.array([match.num_tokens if match else 0 for match in matches], dtype=np.int64)

    def candidates(self, width: int) -> list[int]:
        """Indices of the rows that have the slots for a block of `width`, and a use for it."""
        found: list[int] = np.flatnonzero(self.open_slots >= width - 1).tolist()
        return found


def load_of(plan: StepPlan, limits: ModelLimits, guesses: Guesses | None = None) -> Load:
    rows = plan.decoding
    caps = tuple(min(row.draft_slots, tokens_left(row.sequence, limits) - 1) for row in rows)
    return Load(rows, caps, plan.num_tokens, plan.draft_room, guesses)


def context_of(rows: Many[Row]) -> int:
    """Tokens of context that the rows read together."""
    return sum(row.start + row.num_tokens for row in rows)


@dataclass(frozen=True)
class Order:
    """Which rows to draft in a step, and how wide. Width 0: none, and why.

    Guesses need no order: all of them bid, but for those that are left out.
    """

    load: Load
    rows: tuple[Row, ...] = ()
    places: tuple[int, ...] = ()  # of the rows among the decoding ones
    caps: tuple[int, ...] = ()
    width: int = 0
    no_draft: NoDraft | None = None
    is_probe: bool = False
    num_whole: int = 0  # the first so many rows are verified whole, for calibration
    left_out: tuple[int, ...] = ()  # decoding rows whose guesses do not bid

    @cached_property
    def guessed(self) -> Floats:
        """Survival of the guesses that bid [N, J]; 0 where there is none."""
        if not self.left_out:
            return self.load.promises
        bidding = self.load.promises.copy()
        bidding[list(self.left_out)] = 0.0
        return bidding


@dataclass(frozen=True)
class Allotment:
    """What is to be verified of the drafted blocks, and of the guesses. Never both of one row."""

    lengths: Ints  # [R]
    guess_lengths: Ints  # [N]
    estimate: Estimate
    survival: Floats  # [R, J], the estimate calibrated


class LengthPolicy(Protocol):
    """A rule of the table in speculation/policies.py."""

    name: str
    is_paying: bool  # whether drafting is thought to pay

    def order(self, load: Load) -> Order:
        """What to draft, before anything is known of the blocks."""
        ...

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        """Drafts to verify of each block, then of each guess that bids [R + N].

        The budget fits them into caps and room.
        """
        ...


class Budget:
    """Orders blocks, allots verification, and learns from the outcome."""

    def __init__(
        self,
        policy: LengthPolicy,
        limits: ModelLimits,
        calibration: Calibration,
        costs: CostModel | None = None,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._calibration = calibration
        self._costs = costs
        self._num_steps = 0
        self.expected_drafts = 0  # of the next step, going by the last

    def order(self, plan: StepPlan, guesses: Guesses | None = None) -> Order:
        return self._policy.order(load_of(plan, self._limits, guesses))

    def allot(self, order: Order, estimate: Estimate = NO_BLOCKS) -> Allotment:
        num_blocks, num_guesses = len(order.rows), order.load.num_rows
        estimate = _without_nan(estimate)
        survival = self._calibration.survival(estimate.conditional)
        lengths = np.zeros(num_blocks + num_guesses, dtype=np.int64)
        if num_blocks or order.guessed.any():
            lengths = self._policy.lengths(order, estimate, survival)
            lengths[: min(order.num_whole, num_blocks)] = order.width
            caps = [*order.caps, *(order.guessed > 0).sum(axis=1).tolist()]
            lengths = fit(lengths, caps, order.load.room)
        return Allotment(lengths[:num_blocks], lengths[num_blocks:], estimate, survival)

    def learn(
        self, order: Order, allotment: Allotment | None, accepted: Many[int], work: StepWork
    ) -> SpeculationStats:
        """Take in what a step showed: drafts accepted of each block, and times."""
        self.expected_drafts = _expected(order, work.num_drafts)
        predicted: list[float] = []
        if allotment is not None:
            predicted = _predicted(order, allotment)
        if allotment is not None and order.rows:
            self._calibration.learn(
                allotment.estimate.conditional, allotment.lengths, np.array(accepted)
            )
        predicted_s = 0.0
        self._num_steps += 1
        is_sample = work.num_drafts > 0 or order.width > 0 or self._num_steps % LEARN_EVERY == 0
        # Prefill chunks cost by their context too, which the model does not know.
        if self._costs is not None and is_sample and not order.load.has_prefill:
            predicted_s = self._costs.seconds(work)
            self._costs.learn(work, PROBE_RATE if order.is_probe else RATE)
        return SpeculationStats(
            width=order.width,
            no_draft=order.no_draft,
            is_probe=order.is_probe,
            is_full_width=order.num_whole > 0,
            is_paying=self._policy.is_paying,
            predicted_accepted=predicted,
            predicted_s=predicted_s,
            observed_s=work.seconds if predicted_s else 0.0,
        )


def _without_nan(estimate: Estimate) -> Estimate:
    """A block of which the head can say nothing, as after an overflow, is worth nothing."""
    return Estimate(
        np.nan_to_num(estimate.conditional, posinf=1.0), np.nan_to_num(estimate.ratio, posinf=1.0)
    )


def _predicted(order: Order, allotment: Allotment) -> list[float]:
    """Acceptances expected of what is verified, by position."""
    blocks = usable(allotment.survival, allotment.lengths).sum(axis=0)
    guesses = usable(order.guessed, allotment.guess_lengths).sum(axis=0)
    total = np.zeros(max(len(blocks), len(guesses)))
    total[: len(blocks)] += blocks
    total[: len(guesses)] += guesses
    found: list[float] = total.tolist()
    return found


def _expected(order: Order, num_drafts: int) -> int:
    """As many as in this step; more if the step's limit, not the policy, kept them so few.

    Otherwise prefill, which fills what nobody expects to need, would keep drafts out for as long as
    prompts are waiting.
    """
    load = order.load
    if num_drafts < load.room:
        return num_drafts
    if order.no_draft in (NoDraft.OFF, NoDraft.NO_GAIN, NoDraft.LOOKUP):
        return max(num_drafts, round(float(order.guessed.sum())))
    return min(2 * num_drafts + load.num_rows, sum(load.caps))


def order_all(load: Load, width: int, goes_by_guess: Bools) -> Order:
    """Draft every row that can use it and does not go by its guess; width 0: there is no drafter.

    goes_by_guess: [N], by decoding row.
    """
    left_out = tuple(np.flatnonzero(~goes_by_guess).tolist()) if load.promises.any() else ()
    chosen = [place for place in load.candidates(width) if not goes_by_guess[place]]
    if width > 0 and chosen and load.room > 0:
        return order_rows(load, chosen, width, left_out=left_out)
    if width == 0:
        why = NoDraft.OFF
    else:
        why = NoDraft.LOOKUP if load.room > 0 and goes_by_guess.any() else NoDraft.NO_ROOM
    return Order(load, no_draft=why, left_out=left_out)


def order_rows(
    load: Load,
    chosen: list[int],
    width: int,
    *,
    is_probe: bool = False,
    num_whole: int = 0,
    left_out: tuple[int, ...] = (),
) -> Order:
    return Order(
        load,
        rows=tuple(load.rows[index] for index in chosen),
        places=tuple(chosen),
        caps=tuple(min(load.caps[index], width - 1) for index in chosen),
        width=width,
        is_probe=is_probe,
        num_whole=num_whole,
        left_out=left_out or tuple(chosen[:num_whole]),
    )


def best_prefixes(
    survival: Floats,
    room: int,
    *,
    num_rows: float,
    cost_s: Callable[[Ints], Floats],
    propose_s: Callable[[Ints], Floats] = lambda num_proposed: np.zeros(len(num_proposed)),
    num_blocks: int | None = None,
) -> tuple[Ints, float]:
    """Lengths [R] with the most tokens per second, and that rate.

    survival: [R, J], falling along J; 0 where a draft cannot be used. num_rows: rows that emit a
    token anyway. cost_s: seconds of the step with so many drafts, for an array of numbers;
    propose_s: what so many of the first `num_blocks` rows cost on top (None: of all).
    """
    flat = survival.ravel()
    # Stable: of equals within a row the earlier position goes first.
    ranked = np.argsort(-flat, kind="stable")[:room]
    ranked = ranked[flat[ranked] > 0]
    tokens = num_rows + np.concatenate(([0.0], np.cumsum(flat[ranked])))
    row = ranked // max(1, survival.shape[1])
    is_proposed = row < (len(survival) if num_blocks is None else num_blocks)
    seconds = cost_s(np.arange(len(tokens)))
    seconds = seconds + propose_s(np.concatenate(([0], np.cumsum(is_proposed))))
    rates = tokens / np.maximum(seconds, 1e-9)
    best = int(np.argmax(rates))
    lengths = np.bincount(row[:best], minlength=len(survival))
    return lengths.astype(np.int64), float(rates[best])


def usable(survival: Floats, caps: Many[int] | Ints) -> Floats:
    """`survival` [R, J] with 0 beyond each row's cap."""
    position = np.arange(1, survival.shape[1] + 1)
    return np.where(position <= np.array(caps, dtype=np.int64)[:, None], survival, 0.0)


def fit(lengths: Ints, caps: Many[int], room: int) -> Ints:
    """Lengths within the caps and, together, within the room; the longest are cut first."""
    wanted = np.minimum(lengths, np.array(caps, dtype=np.int64))
    level = int(wanted.max(initial=0))
    while np.minimum(wanted, level).sum() > room:
        level -= 1
    fitted = np.minimum(wanted, level)
    longer = np.flatnonzero(wanted > level)[: room - int(fitted.sum())]
    fitted[longer] += 1
    return fitted
