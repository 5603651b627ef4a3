"""What a step costs, in seconds: measured at start, corrected while serving. No torch.

Real costs are staircases, so each part of a step is a table over its rows, linear in between, plus
a price per token of context that its attention reads.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORMAT = 1  # of the file
CONTEXT_UNIT = 50_000  # tokens; brings the context's price to the size of the others
RATE = 0.03  # of a correction, by normalised least mean squares (Widrow and Hoff, 1960)
PROBE_RATE = 0.3  # when a probe looks at sizes that steps do not reach: it comes seldom
SPEED_RATE = 0.3  # the machine as a whole gets slower and faster quicker than its shape changes
MAX_SURPRISE = 2.0  # what took longer than this many times the prediction was disturbed


class CostCurve:
    """Seconds of one kind of pass by its rows, ascending, at least one entry.

    They never fall with the rows: of a measured table that does, the higher entries before the fall
    are taken to have been disturbed.
    """

    def __init__(
        self, rows: list[int], seconds: list[float], per_context_unit: float = 0.0
    ) -> None:
        assert len(rows) == len(seconds) > 0
        assert rows == sorted(set(rows))
        assert rows[0] > 0
        self.rows: Floats = np.array(rows, dtype=np.float64)
        self.seconds: Floats = _lowered(np.array(seconds, dtype=np.float64))
        self.per_context_unit = per_context_unit

    def at(self, rows: Ints | Floats, context_tokens: int = 0) -> Floats:
        """Seconds, never falling with the rows; 0 for no rows."""
        beyond = np.maximum(rows / self.rows[-1], 1.0)
        seconds = np.interp(rows, self.rows, self.seconds) * beyond
        seconds = seconds + self.per_context_unit * context_tokens / CONTEXT_UNIT
        found: Floats = np.where(rows > 0, seconds, 0.0)
        return found

    def learn(self, rows: int, context_tokens: int, seconds: float, rate: float = RATE) -> None:
        """Correct the table around `rows`, and the context's price, towards what was observed."""
        if rows == 0:
            return
        predicted = float(self.at(np.array([rows]), context_tokens)[0])
        error = float(np.clip(seconds, predicted / MAX_SURPRISE, predicted * MAX_SURPRISE))
        error -= predicted
        index = np.arange(len(self.rows))
        weights = np.maximum(0, 1 - np.abs(index - np.interp(rows, self.rows, index)))
        weights *= max(1.0, rows / float(self.rows[-1]))
        context = context_tokens / CONTEXT_UNIT
        step = rate * error / (float(weights @ weights) + context**2)
        corrected = np.maximum(self.seconds + step * weights, 1e-7)
        # What rises takes the entries behind it along, what falls those before it.
        self.seconds = np.maximum.accumulate(corrected) if step > 0 else _lowered(corrected)
        self.per_context_unit = max(0.0, self.per_context_unit + step * context)

    def stored(self) -> "StoredCurve":
        rows = [int(rows) for rows in self.rows]
        return StoredCurve(rows, self.seconds.tolist(), self.per_context_unit)


def _lowered(seconds: Floats) -> Floats:
    """No entry above any behind it."""
    lowered: Floats = np.minimum.accumulate(seconds[::-1])[::-1]
    return lowered


@dataclass(frozen=True)
class StepWork:
    """How much of everything a step did, and how long its parts took."""

    block_rows: int = 0  # rows that the drafter denoised
    num_drafts: int = 0
    num_looked_up: int = 0  # of the drafts; nobody proposed these
    num_tokens: int = 0  # that the target computed, drafts included
    num_choices: int = 0
    context_tokens: int = 0  # of all rows together
    block_context_tokens: int = 0  # of the rows that were drafted
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0

    @property
    def num_proposed(self) -> int:
        return self.num_drafts - self.num_looked_up

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s


@dataclass
class CostModel:
    """The parts of a step. `speed` scales all of them: other programs share the machine."""

    denoise: CostCurve  # by block rows
    propose: CostCurve  # by drafts: LM head and choice
    verify: CostCurve  # by tokens of the target's pass
    choose: CostCurve  # by positions at which the target chooses
    speed: float = 1.0

    def drafting_s(self, work: StepWork) -> float:
        denoise = self.denoise.at(np.array([work.block_rows]), work.block_context_tokens)
        return self.speed * float(denoise[0] + self.propose.at(np.array([work.num_proposed]))[0])

    def seconds(self, work: StepWork) -> float:
        """Of a step that did this work."""
        verify = self.verify.at(np.array([work.num_tokens]), work.context_tokens)
        choose = self.choose.at(np.array([work.num_choices]))
        return self.drafting_s(work) + self.speed * float(verify[0] + choose[0])

    def learn(self, work: StepWork, rate: float = RATE) -> None:
        """Correct the model by one step's times."""
        ratio = work.seconds / max(self.seconds(work), 1e-9)
        self.speed *= float(np.clip(ratio, 1 / MAX_SURPRISE, MAX_SURPRISE)) ** SPEED_RATE
        self.verify.learn(work.num_tokens, work.context_tokens, work.verify_s / self.speed, rate)
        self.choose.learn(work.num_choices, 0, work.sample_s / self.speed, rate)
        if work.block_rows:
            # One clock for both halves of drafting: the error is shared by their sizes.
            share = work.draft_s / max(self.drafting_s(work), 1e-9)
            rows, context = work.block_rows, work.block_context_tokens
            denoise_s = float(self.denoise.at(np.array([rows]), context)[0])
            propose_s = float(self.propose.at(np.array([work.num_proposed]))[0])
            self.denoise.learn(rows, context, share * denoise_s, rate)
            self.propose.learn(work.num_proposed, 0, share * propose_s, rate)

    def save(self, path: Path, key: str) -> None:
        """Write to `path`, whole or not at all. key: of what it was measured on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        curves = [
            curve.stored() for curve in (self.denoise, self.propose, self.verify, self.choose)
        ]
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(msgspec.json.encode(_Stored(FORMAT, key, self.speed, *curves)))
        scratch.replace(path)


class StoredCurve(msgspec.Struct, frozen=True):
    """A CostCurve in a file."""

    rows: list[Annotated[int, msgspec.Meta(ge=1)]]
    seconds: list[Annotated[float, msgspec.Meta(gt=0)]]
    per_context_unit: Annotated[float, msgspec.Meta(ge=0)]

    def curve(self) -> CostCurve:
        """Raises ValueError."""
        rows, finite = self.rows, all(map(math.isfinite, [*self.seconds, self.per_context_unit]))
        if not finite or not len(rows) == len(self.seconds) > 0 or rows != sorted(set(rows)):
            raise ValueError("not a table of costs")
        return CostCurve(rows, self.seconds, self.per_context_unit)


class _Stored(msgspec.Struct, frozen=True):
    """A CostModel in a file."""

    format: int
    key: str
    speed: Annotated[float, msgspec.Meta(gt=0)]
    denoise: StoredCurve
    propose: StoredCurve
    verify: StoredCurve
    choose: StoredCurve


def load_costs(path: Path, key: str) -> CostModel | None:
    """What `save` wrote for the same key; None if there is no such file or it is of no use."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        if stored.format != FORMAT or stored.key != key or not math.isfinite(stored.speed):
            return None
        return CostModel(
            denoise=stored.denoise.curve(),
            propose=stored.propose.curve(),
            verify=stored.verify.curve(),
            choose=stored.choose.curve(),
            speed=stored.speed,
        )
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError, OverflowError):
        return None
