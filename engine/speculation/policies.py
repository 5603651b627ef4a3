"""The policies: which rows to draft, and how much of each block to verify. No torch."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

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

RESUME_GAIN = 1.03  # drafting that has stopped starts again at this gain, and stops below 1
SAMPLED_ROWS = 8  # rows of a probe, and of a step that verifies whole blocks for calibration
RECENT_BLOCKS = 128  # blocks from which the next ones are forecast, if so many rows are drafted
FORECAST_BLOCKS = 32  # at least so many, also when the rows are fewer
FIRST_BLOCKS = 24  # blocks to look at before judging whether drafting pays
USUAL_RATE = 0.3  # weight of the newest step in the running mean of chances
RETHINK_EVERY = 4  # steps for which an outlook holds while the load stays about the same
MAX_PROBE_GAP = 8  # probes that find no gain come ever more seldom, up to so many times the gap


class Off:
    """Plain decoding."""

    name = "off"
    is_paying = False

    def order(self, load: Load) -> Order:
        return Order(load, no_draft=NoDraft.OFF)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        return np.zeros(len(order.rows), dtype=np.int64)


class Fixed:
    """The same number of drafts for everybody, as far as there is room."""

    is_paying = True

    def __init__(self, length: int, widths: tuple[int, ...]) -> None:
        self.name = f"fixed:{length}"
        self._length = length
        self._width = min((w for w in widths if w > length), default=widths[-1])

    def order(self, load: Load) -> Order:
        return order_all(load, self._width)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        return np.full(len(order.rows), min(self._length, order.width - 1))


class Threshold:
    """The published rule: `clamp(round(r * B * rate), min, B)` tokens, the newest one included.

    r is the head's share of a block, smoothed over the steps of a request (arXiv 2607.19223).
    """

    name = "threshold"
    is_paying = True

    def __init__(self, config: SpeculationConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size

    def order(self, load: Load) -> Order:
        return order_all(load, self._block_size)

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
        return np.array(lengths, dtype=np.int64)


class Goodput:
    """The most expected tokens per second over all requests together, by a measured cost model.

    Whether to draft at all, and how wide, is decided before the drafter runs, from how the newest
    blocks looked; what to verify, from how these blocks look.
    """

    name = "goodput"

    def __init__(
        self,
        config: SpeculationConfig,
        widths: tuple[int, ...],
        costs: CostModel,
        calibration: Calibration,
    ) -> None:
        self.is_paying = True
        self._config = config
        self._widths = widths
        self._costs = costs
        self._calibration = calibration
        self._recent: deque[Floats] = deque(maxlen=RECENT_BLOCKS)  # conditional chances [B - 1]
        self._usual: Floats = np.ones(widths[-1] - 1)  # chances by position, a running mean
        self._num_idle = 0  # steps since the last that drafted
        self._probe_gap = config.probe_every
        self._num_drafting = 0  # steps
        self._best, self._size = (widths[0], 0.0), (0, 0)  # the last outlook, and the load then
        self._outlook_age = 0  # steps
        self._num_sampled = 0  # steps that verified whole blocks

    def order(self, load: Load) -> Order:
        if len(self._recent) < FIRST_BLOCKS:
            return self._sample(load, self._widths[-1])
        if not load.candidates(self._widths[0]):
            return Order(load, no_draft=NoDraft.NO_ROOM)
        # Without room now: would it pay with room? Then some is kept free in the next step.
        width, gain = self._outlook(load if load.room else replace(load, room=sum(load.caps)))
        self.is_paying = gain > (1 if self.is_paying else RESUME_GAIN)
        if not self.is_paying:
            return self._idle(load, width)
        if load.room == 0:
            return Order(load, no_draft=NoDraft.NO_ROOM)
        self._num_idle, self._probe_gap = 0, self._config.probe_every
        self._num_drafting += 1
        widest = self._widths[-1]
        if self._num_drafting % self._config.full_width_every == 0 and load.candidates(widest):
            return _order(load, self._rotated(load, widest), widest, num_whole=SAMPLED_ROWS)
        return order_all(load, width)

    def lengths(self, order: Order, estimate: Estimate, survival: Floats) -> Ints:
        self._remember(estimate)
        lengths, _ = best_prefixes(
            usable(survival, order.caps),
            order.load.room,
            num_rows=order.load.num_rows,
            cost_s=self._cost_of(order.load, len(order.rows) * order.width, context_of(order.rows)),
        )
        return lengths

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

    def _promise(self, load: Load, chosen: list[int], width: int, blocks: Floats) -> float:
        """Tokens per second of drafting `chosen`, if their blocks were like these.

        blocks: survival [M, width - 1]. M need not be the number of rows: of a few rows' newest
        blocks little can be said, and of many rows' enough by a part.
        """
        steps = len(blocks) / len(chosen)  # that draft so many blocks
        caps = np.resize([load.caps[index] for index in chosen], len(blocks))
        context = int(load.contexts[chosen].sum())
        cost_s = self._cost_of(load, len(chosen) * width, context)
        _, rate = best_prefixes(
            usable(blocks, caps),
            round(load.room * steps),
            num_rows=load.num_rows * steps,
            cost_s=lambda num_drafts: steps * cost_s(num_drafts / steps),
        )
        return rate

    def _forecast(self, num_rows: int, width: int) -> Floats:
        """Survival [M, width - 1] as the newest blocks had it, by today's calibration."""
        newest = np.stack(self._recent)[-max(num_rows, FORECAST_BLOCKS) :]
        return self._calibration.survival(newest[:, : width - 1])

    def _cost_of(
        self, load: Load, block_rows: int, context: int
    ) -> Callable[[Ints | Floats], Floats]:
        """Seconds of the decoding part of the step by its number of drafts.

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
            return base + verify + choose + costs.propose.at(num_drafts)

        return cost_s

    def _idle(self, load: Load, width: int) -> Order:
        self._num_idle += 1
        if self._num_idle < self._probe_gap:
            return Order(load, no_draft=NoDraft.NO_GAIN)
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


def order_all(load: Load, width: int) -> Order:
    """Draft every row that can use it."""
    chosen = load.candidates(width)
    if not chosen or load.room == 0:
        return Order(load, no_draft=NoDraft.NO_ROOM)
    return _order(load, chosen, width)


def _order(
    load: Load, chosen: list[int], width: int, *, is_probe: bool = False, num_whole: int = 0
) -> Order:
    return Order(
        load,
        rows=tuple(load.rows[index] for index in chosen),
        caps=tuple(min(load.caps[index], width - 1) for index in chosen),
        width=width,
        is_probe=is_probe,
        num_whole=num_whole,
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
    Policy.THRESHOLD: lambda parts: Threshold(parts.config, parts.widths[-1]),
    Policy.GOODPUT: lambda parts: Goodput(
        parts.config, parts.widths, parts.costs, parts.calibration
    ),
}


def drafting_budget(
    config: SpeculationConfig, widths: tuple[int, ...], limits: ModelLimits, costs: CostModel
) -> Budget:
    """The budget of an engine with a drafter. widths: block sizes it may denoise, ascending."""
    calibration = Calibration(widths[-1] - 1)
    policy = POLICIES[config.policy](PolicyParts(config, widths, costs, calibration))
    return Budget(policy, limits, calibration, costs)


def plain_budget(limits: ModelLimits) -> Budget:
    """The budget of an engine that drafts nothing."""
    return Budget(Off(), limits, Calibration(0))
