"""The policies: which rows to draft, and how much of each block to verify. No torch."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import NoDraft
from adaflash.engine.speculation.budget import (
    Budget,
    Estimate,
    LengthPolicy,
    Load,
    Order,
    best_prefixes,
    context_of,
    usable,
)
from adaflash.engine.speculation.calibration import Calibration, Floats, Ints
from adaflash.engine.speculation.costs import CostModel
from adaflash.engine.stopping import ModelLimits

Bools = NDArray[np.bool_]

RESUME_GAIN = 1.03  # drafting that has stopped starts again at this gain, and stops below 1
SAMPLED_ROWS = 8  # rows of a probe, and of a step that verifies whole blocks for calibration
RECENT_BLOCKS = 128  # blocks from which the next ones are forecast, if so many rows are drafted
FORECAST_BLOCKS = 32  # at least so many, also when the rows are fewer
FIRST_BLOCKS = 24  # blocks to look at before judging whether drafting pays
USUAL_RATE = 0.3  # weight of the newest step in the running mean of chances
RETHINK_EVERY = 4  # steps for which an outlook holds while the load stays about the same
FLOOR = 0.5  # of `fixed`: a guess is used if its first draft is right with this chance
LONG_MATCH = 8  # tokens; of `threshold` with a drafter: guesses after shorter ones are not used
MAX_PROBE_GAP = 8  # probes that find no gain come ever more seldom, up to so many times the gap


class Off:
    """Plain decoding."""

    name = "off"
    is_paying = False

    def order(self, load: Load) -> Order:
        return Order(load, no_draft=NoDraft.OFF)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        return np.zeros(len(order.rows) + order.load.num_rows, dtype=np.int64)


class Fixed:
    """The same number of drafts for everybody, as far as there is room."""

    def __init__(self, length: int, widths: tuple[int, ...]) -> None:
        self.name = f"fixed:{length}"
        self.is_paying = bool(widths)
        self._length = length
        wide_enough = [width for width in widths if width > length]
        self._width = min(wide_enough or widths[-1:], default=0)

    def order(self, load: Load) -> Order:
        goes_by_guess: Bools = np.any(load.promises >= FLOOR, axis=1)
        return order_all(load, self._width, goes_by_guess)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        blocks = np.full(len(order.rows), min(self._length, order.width - 1))
        return np.concatenate((blocks, np.full(order.load.num_rows, self._length)))


class Threshold:
    """The published rule: `clamp(round(r * B * rate), min, B)` tokens, the newest one included.

    r is the head's share of a block, smoothed over the steps of a request (arXiv 2607.19223). Of a
    guess as many tokens are verified as are expected to be right, times the same rate.
    """

    name = "threshold"

    def __init__(self, config: SpeculationConfig, block_size: int) -> None:
        """block_size: 0 without a drafter."""
        self.is_paying = block_size > 0
        self._config = config
        self._block_size = block_size

    def order(self, load: Load) -> Order:
        shortest = LONG_MATCH if self._block_size else 1
        return order_all(load, self._block_size, load.matched >= shortest)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        rate, least = self._config.threshold_rate, self._config.threshold_min
        kept = 1 - self._config.threshold_ema
        lengths = []
        for row, newest in zip(order.rows, estimate.ratio.tolist(), strict=True):
            sequence = row.sequence
            before = newest if sequence.length_ratio is None else sequence.length_ratio
            sequence.length_ratio = kept * before + (1 - kept) * newest
            tokens = round(sequence.length_ratio * self._block_size * rate)
            lengths.append(min(max(tokens, least), self._block_size) - 1)
        expected = np.rint((1 + order.guessed.sum(axis=1)) * rate).astype(np.int64)
        return np.concatenate((np.array(lengths, dtype=np.int64), np.maximum(expected, least) - 1))


class Goodput:
    """The most expected tokens per second over all requests together, by a measured cost model.

    Whether to draft at all, and how wide, is decided before the drafter runs, from how the newest
    blocks looked; what to verify, from how these blocks look. Rows whose guess promises more than
    blocks usually do are not drafted; of the others the guess and the block both bid.
    """

    name = "goodput"

    def __init__(
        self,
        config: SpeculationConfig,
        widths: tuple[int, ...],
        costs: CostModel,
        calibration: Calibration,
    ) -> None:
        """widths: none without a drafter."""
        self.is_paying = bool(widths)
        self._config = config
        self._widths = widths
        self._costs = costs
        self._calibration = calibration
        self._recent: deque[Floats] = deque(maxlen=RECENT_BLOCKS)  # conditional chances [B - 1]
        # Chances by position, a running mean.
        self._usual: Floats = np.ones(max(widths, default=1) - 1)
        self._num_idle = 0  # steps since the last that drafted
        self._probe_gap = config.probe_every
        self._num_drafting = 0  # steps
        # The last outlook, and the load then.
        self._best, self._size = (min(widths, default=0), 0.0), (0, 0)
        self._outlook_age = 0  # steps
        self._num_sampled = 0  # steps that verified whole blocks

    def order(self, load: Load) -> Order:
        if not self._widths:
            return Order(load, no_draft=NoDraft.OFF)
        if len(self._recent) < FIRST_BLOCKS:
            order = self._sample(load, self._widths[-1])
            self.is_paying = order.no_draft is not NoDraft.NO_GAIN
            return order
        if not load.candidates(self._widths[0]):
            return Order(load, no_draft=NoDraft.NO_ROOM)
        # Without room now: would it pay with room? Then some is kept free in the next step.
        width, gain = self._outlook(load if load.room else replace(load, room=sum(load.caps)))
        self.is_paying = gain > (1 if self.is_paying else RESUME_GAIN)
        if not self.is_paying:
            return self._idle(load, width)
        if load.room == 0:
            return Order(load, no_draft=NoDraft.NO_ROOM)
        others = self._without_strong_guesses(load, width)
        if others is not load and not self._pays_beside_guesses(load, others, width):
            return self._idle(load, width, NoDraft.LOOKUP)
        self._num_idle, self._probe_gap = 0, self._config.probe_every
        self._num_drafting += 1
        widest = self._widths[-1]
        if self._num_drafting % self._config.full_width_every == 0 and others.candidates(widest):
            return _order(load, self._rotated(others, widest), widest, num_whole=SAMPLED_ROWS)
        return _order(load, others.candidates(width), width)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        if order.rows:
            self._remember(estimate)
        blocks, guesses = _better_of_each(usable(survival, order.caps), order)
        lengths, rate = self._best_lengths(order, blocks, guesses)
        if blocks.any() and order.guessed.any():  # without any block the draft head does not run
            alone, rate_alone = self._best_lengths(order, np.zeros_like(blocks), order.guessed)
            lengths = alone if rate_alone > rate else lengths
        return lengths

    def _best_lengths(self, order: Order, blocks: Floats, guesses: Floats) -> tuple[Ints, float]:
        """Lengths of the blocks, then of the guesses, with the most tokens per second."""
        return best_prefixes(
            _stacked(blocks, guesses),
            order.load.room,
            num_rows=order.load.num_rows,
            cost_s=self._cost_of(order.load, len(order.rows) * order.width, context_of(order.rows)),
            propose_s=self._costs.propose.at,
            num_blocks=len(blocks),
        )

    def _without_strong_guesses(self, load: Load, width: int) -> Load:
        """The load without use for drafts of the rows whose guess promises more than a block."""
        if not load.promises.any():
            return load
        usual = float(self._forecast(1, width).sum(axis=1).mean())
        is_strong = load.promises.sum(axis=1) >= usual
        caps = np.where(is_strong, 0, load.caps).tolist()
        return replace(load, caps=tuple(caps))

    def _pays_beside_guesses(self, load: Load, others: Load, width: int) -> bool:
        """Whether drafting the others gives more than the guesses of all rows alone."""
        chosen = others.candidates(width)
        if not chosen:
            return False
        lengths, alone = best_prefixes(
            load.promises, load.room, num_rows=load.num_rows, cost_s=self._cost_of(load, 0, 0)
        )
        lengths[chosen] = 0
        given = _Given(int(lengths.sum()), float(usable(load.promises, lengths).sum()))
        blocks = self._forecast(len(chosen), width)
        return self._promise(load, chosen, width, blocks, given) > alone

    def _outlook(self, load: Load) -> tuple[int, float]:
        """`_best_width`, thought over again every few steps, and when the load has changed."""
        self._outlook_age += 1
        size = (load.num_rows, load.context_tokens)
        alike = all(abs(now - then) <= then / 8 for now, then in zip(size, self._size, strict=True))
        if not alike or self._outlook_age >= RETHINK_EVERY or not load.candidates(self._best[0]):
            self._best, self._size, self._outlook_age = self._best_width(load), size, 0
        return self._best

    def _best_width(self, load: Load) -> tuple[int, float]:
        """The block width that promises most, and its rate against not drafting; 0: no room."""
        plain = self._plain(load)
        best_width, best_gain = self._widths[0], 0.0
        for width in self._widths:
            chosen = load.candidates(width)
            if not chosen:
                continue
            rate = self._promise(load, chosen, width, self._forecast(len(chosen), width))
            if rate / plain > best_gain:
                best_width, best_gain = width, rate / plain
        return best_width, best_gain

    def _plain(self, load: Load) -> float:
        """Tokens per second without drafts."""
        seconds = float(self._cost_of(load, 0, 0)(np.zeros(1))[0])
        return load.num_rows / max(seconds, 1e-9)

    def _promise(
        self,
        load: Load,
        chosen: list[int],
        width: int,
        blocks: Floats,
        given: "_Given | None" = None,
    ) -> float:
        """Tokens per second of drafting `chosen`, if their blocks were like these.

        blocks: survival [M, width - 1]. M need not be the number of rows: of a few rows' newest
        blocks little can be said, and of many rows' enough by a part.
        """
        given = given or _Given()
        steps = len(blocks) / len(chosen)  # that draft so many blocks
        caps = np.resize([load.caps[index] for index in chosen], len(blocks))
        context = int(load.contexts[chosen].sum())
        cost_s = self._cost_of(load, len(chosen) * width, context)
        _, rate = best_prefixes(
            usable(blocks, caps),
            round(max(0, load.room - given.num_drafts) * steps),
            num_rows=(load.num_rows + given.num_tokens) * steps,
            cost_s=lambda num_drafts: steps * cost_s(num_drafts / steps + given.num_drafts),
            propose_s=lambda num_drafts: steps * self._costs.propose.at(num_drafts / steps),
        )
        return rate

    def _forecast(self, num_rows: int, width: int) -> Floats:
        """Survival [M, width - 1] as the newest blocks had it, by today's calibration."""
        newest = np.stack(self._recent)[-max(num_rows, FORECAST_BLOCKS) :]
        return self._calibration.survival(newest[:, : width - 1])

    def _cost_of(
        self, load: Load, block_rows: int, context: int
    ) -> Callable[[Ints | Floats], Floats]:
        """Seconds of the decoding part of the step by its number of drafts, once these are known.

        Prefill tokens are not charged: they are due anyway, and only the drafts' own cost on top of
        them counts.
        """
        costs, rows, tokens = self._costs, load.num_rows, load.num_tokens
        one = np.array([1])
        base = float(costs.verify.at(rows * one, load.context_tokens)[0])
        base -= float(costs.verify.at(tokens * one)[0])
        base += float(costs.denoise.at(block_rows * one, context)[0])

        def cost_s(num_drafts: Ints | Floats) -> Floats:
            verify = costs.verify.at(tokens + num_drafts)
            choose = costs.choose.at(rows + num_drafts)
            return base + verify + choose

        return cost_s

    def _idle(self, load: Load, width: int, why: NoDraft = NoDraft.NO_GAIN) -> Order:
        self._num_idle += 1
        if self._num_idle < self._probe_gap:
            return Order(load, no_draft=why)
        order = self._sample(load, width)
        if order.width > 0:
            self._num_idle = 0
            longest = self._config.probe_every * MAX_PROBE_GAP
            self._probe_gap = min(2 * self._probe_gap, longest)
        return order

    def _sample(self, load: Load, width: int) -> Order:
        """Draft a few rows and verify them whole, each time others."""
        chosen = self._rotated(load, width)[:SAMPLED_ROWS]
        if not chosen or load.room == 0:
            return Order(load, no_draft=NoDraft.NO_ROOM)
        if not self._could_pay(load, chosen, width):
            return Order(load, no_draft=NoDraft.NO_GAIN)
        return _order(load, chosen, width, is_probe=True, num_whole=SAMPLED_ROWS)

    def _could_pay(self, load: Load, chosen: list[int], width: int) -> bool:
        """Whether a drafter that is always right would be worth its time."""
        perfect = np.ones((len(chosen), width - 1))
        return self._promise(load, chosen, width, perfect) > self._plain(load)

    def _rotated(self, load: Load, width: int) -> list[int]:
        """All candidates, each time beginning with others."""
        self._num_sampled += 1
        chosen = load.candidates(width)
        start = self._num_sampled * SAMPLED_ROWS % max(1, len(chosen))
        return chosen[start:] + chosen[:start]

    def _remember(self, estimate: Estimate) -> None:
        """A narrow block's missing positions are taken to be as usual, or like its last if worse.

        Like its last alone they would promise too much, and make the next step a wide one.
        """
        conditional = estimate.conditional
        seen, newest = conditional.shape[1], conditional.mean(axis=0)
        if not self._recent:
            self._usual[:seen] = newest
        self._usual[:seen] += USUAL_RATE * (newest - self._usual[:seen])
        missing = np.minimum(conditional[:, -1:], self._usual[seen:])
        self._recent.extend(np.concatenate((conditional, missing), axis=1))


@dataclass(frozen=True)
class _Given:
    """What a step verifies besides blocks."""

    num_drafts: int = 0
    num_tokens: float = 0.0  # of them, expected to be accepted


def _better_of_each(blocks: Floats, order: Order) -> tuple[Floats, Floats]:
    """Of a row that has both only the block or the guess bids: the one that promises more."""
    guesses, places = order.guessed.copy(), np.array(order.places, dtype=np.int64)
    is_better = guesses[places].sum(axis=1) > blocks.sum(axis=1)
    guesses[places[~is_better]] = 0.0
    return np.where(is_better[:, None], 0.0, blocks), guesses


def _stacked(blocks: Floats, guesses: Floats) -> Floats:
    """One below the other [R + N, J], filled up with 0."""
    width = max(blocks.shape[1], guesses.shape[1])
    stacked = np.zeros((len(blocks) + len(guesses), width))
    stacked[: len(blocks), : blocks.shape[1]] = blocks
    stacked[len(blocks) :, : guesses.shape[1]] = guesses
    return stacked


def order_all(load: Load, width: int, goes_by_guess: Bools) -> Order:
    """Draft every row that can use it and does not go by its guess; width 0: there is no drafter.

    goes_by_guess: [N], by decoding row.
    """
    left_out = tuple(np.flatnonzero(~goes_by_guess).tolist()) if load.promises.any() else ()
    chosen = [place for place in load.candidates(width) if not goes_by_guess[place]]
    if width > 0 and chosen and load.room > 0:
        return _order(load, chosen, width, left_out=left_out)
    if width == 0:
        why = NoDraft.OFF
    else:
        why = NoDraft.LOOKUP if load.room > 0 and goes_by_guess.any() else NoDraft.NO_ROOM
    return Order(load, no_draft=why, left_out=left_out)


def _order(
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


@dataclass(frozen=True)
class PolicyParts:
    """What a policy may need."""

    config: SpeculationConfig
    widths: tuple[int, ...]
    costs: CostModel
    calibration: Calibration


def _fixed(parts: PolicyParts) -> LengthPolicy:
    assert parts.config.fixed_length is not None
    return Fixed(parts.config.fixed_length, parts.widths)


POLICIES: dict[Policy, Callable[[PolicyParts], LengthPolicy]] = {
    Policy.OFF: lambda parts: Off(),
    Policy.FIXED: _fixed,
    Policy.THRESHOLD: lambda parts: Threshold(parts.config, max(parts.widths, default=0)),
    Policy.GOODPUT: lambda parts: Goodput(
        parts.config, parts.widths, parts.costs, parts.calibration
    ),
}


def drafting_budget(
    config: SpeculationConfig, widths: tuple[int, ...], limits: ModelLimits, costs: CostModel
) -> Budget:
    """The budget of an engine that drafts.

    widths: block sizes that its drafter may denoise, ascending; none: it only looks up.
    """
    calibration = Calibration(max(widths, default=1) - 1)
    policy = POLICIES[config.policy](PolicyParts(config, widths, costs, calibration))
    return Budget(policy, limits, calibration, costs)


def plain_budget(limits: ModelLimits) -> Budget:
    """The budget of an engine that drafts nothing."""
    return Budget(Off(), limits, Calibration(0))
