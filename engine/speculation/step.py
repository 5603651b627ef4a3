"""One step of the engine: draft, head, budget, verify, accept. Plain decoding drafts nothing."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.sampler import Choice, ChoiceRow
from adaflash.engine.speculation.accept import accept
from adaflash.engine.types import Row, StepPlan


class Target(Protocol):
    """What the step needs of the target model; see engine/target.py."""

    def verify(self, rows: Many[VerifyRow]) -> Tensor: ...


class Chooser(Protocol):
    """What the step needs of the sampler; see engine/sampler.py."""

    def choose(self, logits: Tensor, rows: Many[ChoiceRow]) -> list[Choice]: ...


@dataclass(frozen=True)
class Outcome:
    """What a row emitted: the target's own choices; none while a prompt is being prefilled."""

    row: Row
    emitted: Many[Choice]


def speculative_step(plan: StepPlan, target: Target, chooser: Chooser) -> list[Outcome]:
    """Verify the plan's rows in one target pass and keep what the target agrees with."""
    rows = [VerifyRow(row) for row in plan.rows]  # no draft source yet: lengths are all 0
    logits = target.verify(rows)
    choices = iter(chooser.choose(logits, [spot for row in rows for spot in _choice_rows(row)]))
    return [_outcome(row, [next(choices) for _ in range(row.num_logits)]) for row in rows]


def _choice_rows(row: VerifyRow) -> list[ChoiceRow]:
    """The positions at which the target chooses, each with the drafts before it."""
    return [ChoiceRow(row.row.sequence, row.drafts[:count]) for count in range(row.num_logits)]


def _outcome(row: VerifyRow, choices: list[Choice]) -> Outcome:
    if not choices:
        return Outcome(row.row, ())
    return Outcome(row.row, accept(choices, [c.token_id for c in choices], row.drafts))
