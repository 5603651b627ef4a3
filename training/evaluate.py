"""How good a drafter is on texts of the target that it was not trained on.

Each text is walked as the server would: from the first answer token, a block, what of it is right,
one token more, and again. All blocks of a text are drafted at once beforehand, from every position.
Greedy: a draft is right if it is the text's own token; drafts before it are the text's too, or it
would not matter.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from adaflash.engine.models.drafter import Drafter
from adaflash.training.batches import anchor_range, make_batch
from adaflash.training.features import Text
from adaflash.training.forward import chain_states
from adaflash.training.losses import reached_places
from adaflash.training.objective import TargetEnds, draft, mixed_precision

NUM_BINS = 10  # of the calibration


@dataclass
class DomainFigures:
    """Counts over the walks through one domain's texts."""

    num_texts: int = 0
    num_verifications: int = 0
    num_accepted: int = 0
    reached: list[int] = field(default_factory=list)  # by place
    right: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens per verification, the target's own among them."""
        return 1 + self.num_accepted / max(1, self.num_verifications)

    def add(self, accepted: Sequence[int], num_places: int) -> None:
        self.num_texts += 1
        self.num_verifications += len(accepted)
        self.num_accepted += sum(accepted)
        self.reached = self.reached or [0] * num_places
        self.right = self.right or [0] * num_places
        for count in accepted:
            for place in range(num_places):
                self.reached[place] += count >= place
                self.right[place] += count > place

    def conditional(self) -> list[float]:
        """P(right | all before right), by place."""
        return [r / max(1, n) for r, n in zip(self.right, self.reached, strict=True)]


@dataclass
class Evaluation:
    """By domain, and the calibration of the survival head over all."""

    domains: dict[str, DomainFigures] = field(default_factory=lambda: defaultdict(DomainFigures))
    bins: list[list[float]] = field(  # count, sum of expected, sum of observed survival
        default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
    )

    @property
    def accepted_length(self) -> float:
        verifications = sum(d.num_verifications for d in self.domains.values())
        return 1 + sum(d.num_accepted for d in self.domains.values()) / max(1, verifications)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the survival over all places."""
        total = sum(count for count, _, _ in self.bins)
        return sum(abs(expected - seen) for _, expected, seen in self.bins) / max(1.0, total)

    def line(self) -> str:
        own = ", ".join(
            f"{name} {figures.accepted_length:.2f}"
            for name, figures in sorted(self.domains.items())
        )
        return (
            f"accepted length {self.accepted_length:.3f} ({own}), "
            f"calibration error {self.calibration_error:.3f}"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "accepted_length": self.accepted_length,
            "calibration_error": self.calibration_error,
            "domains": {
                name: {
                    "texts": figures.num_texts,
                    "accepted_length": figures.accepted_length,
                    "conditional": figures.conditional(),
                }
                for name, figures in sorted(self.domains.items())
            },
            "calibration": self.bins,
        }


@torch.inference_mode()
def evaluate(drafter: Drafter, ends: TargetEnds, texts: Sequence[Text]) -> Evaluation:
    found = Evaluation()
    for text in texts:
        counts, survival = accepted_everywhere(drafter, ends, text)
        _add_calibration(found, counts, survival)
        walked = list(walk(counts.tolist()))
        found.domains[text.trajectory.domain].add(walked, survival.shape[1])
    return found


def accepted_everywhere(drafter: Drafter, ends: TargetEnds, text: Text) -> tuple[Tensor, Tensor]:
    """Right drafts of the whole block at every anchor of the answer [A], and survival [A, K]."""
    length = len(text.token_ids)
    anchors = list(anchor_range(text, length))
    batch = make_batch([text], [anchors], drafter.config.block_size, length)
    with mixed_precision():
        blocks = draft(drafter, ends, batch)
        states = chain_states(drafter, blocks.hidden, ends.embedding[blocks.tokens[:, :-1]])
        logits = functional.linear(states, ends.head)
    right = logits.argmax(-1) == ends.column_of[blocks.tokens[:, 1:]]
    matches = right & blocks.valid
    estimate = drafter.head.estimate(blocks.hidden.float())
    counts = (reached_places(matches) & matches).sum(dim=1)
    return counts, estimate.conditional.cumprod(dim=1)


def walk(accepted: Sequence[int]) -> Sequence[int]:
    """Of the counts at all anchors, those at which the server would draft."""
    taken, place = [], 0
    while place < len(accepted):
        taken.append(accepted[place])
        place += accepted[place] + 1
    return taken


def _add_calibration(found: Evaluation, counts: Tensor, survival: Tensor) -> None:
    places = torch.arange(1, survival.shape[1] + 1)
    survived = (counts[:, None] >= places).double().flatten()
    expected = survival.double().flatten()
    chosen = (expected * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    for number, totals in enumerate(found.bins):
        inside = chosen == number
        totals[0] += float(inside.sum())
        totals[1] += float(expected[inside].sum())
        totals[2] += float(survived[inside].sum())
