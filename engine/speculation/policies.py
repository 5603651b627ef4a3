"""The policies: which rows to draft, and how much of each block to verify. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import NoDraft
from adaflash.engine.speculation.budget import (
    Budget,
    Estimate,
    LengthPolicy,
    Load,
    Order,
    order_all,
)
from adaflash.engine.speculation.calibration import Bools, Calibration, Floats, Ints
from adaflash.engine.speculation.costs import CostModel
from adaflash.engine.speculation.goodput import Goodput
from adaflash.engine.stopping import ModelLimits

FLOOR = 0.5  # of `fixed`: a guess is used if its first draft is right with this chance
LONG_MATCH = 8  # tokens; of `threshold` with a drafter: guesses after shorter ones are not used


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
