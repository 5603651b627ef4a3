"""The default policy: the most expected tokens per second over all requests. No torch."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from adaflash.engine.config import SpeculationConfig
from adaflash.engine.messages import NoDraft
from adaflash.engine.speculation.budget import (
    Estimate,
    Load,
    Order,
    best_prefixes,
    context_of,
    order_rows,
    usable,
)
from adaflash.engine.speculation.calibration import Calibration, Floats, Ints
from adaflash.engine.speculation.costs import CostModel

RESUME_GAIN = 1.03  # drafting that has stopped starts again at this gain, and stops below 1
SAMPLED_ROWS = 8  # rows of a probe, and of a step that verifies whole blocks for calibration
RECENT_BLOCKS = 128  # blocks from which the next ones are forecast, if so many rows are drafted
FORECAST_BLOCKS = 32  # at least so many, also when the rows are fewer
FIRST_BLOCKS = 24  # blocks to look at before judging whether drafting pays
USUAL_RATE = 0.3  # weight of the newest step in the running mean of chances
RETHINK_EVERY = 4  # steps for which an outlook holds while the load stays about the same
MAX_PROBE_GAP = 8  # probes that find no gain come ever more seldom, up to so many times the gap


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
            return order_rows(load, self._rotated(others, widest), widest, num_whole=SAMPLED_ROWS)
        return order_rows(load, others.candidates(width), width)

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
        return order_rows(load, chosen, width, is_probe=True, num_whole=SAMPLED_ROWS)

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
