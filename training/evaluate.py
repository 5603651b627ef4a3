"""How good a drafter is on texts of the target that it was not trained on.

Each text is walked as the server would: from the first answer token, a block, what of it is right,
one token more, and again. All blocks of a text are drafted at once beforehand, from every position.
A draft is right if it is the text's own token; drafts before it are the text's too, or it would not
matter. A sampled text carries its seed: drafts are chosen with the noise that chose it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from adaflash.engine.models.drafter import Drafter
from adaflash.kernels.sampling import gumbel_noise, noise_keys
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

    def survival(self) -> list[float]:
        """P(the first k right), by place."""
        return [right / max(1, self.num_verifications) for right in self.right]

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
    def together(self) -> DomainFigures:
        """All domains as one."""
        every = list(self.domains.values())
        return DomainFigures(
            sum(each.num_texts for each in every),
            sum(each.num_verifications for each in every),
            sum(each.num_accepted for each in every),
            [sum(counts) for counts in zip(*(each.reached for each in every), strict=True)],
            [sum(counts) for counts in zip(*(each.right for each in every), strict=True)],
        )

    @property
    def accepted_length(self) -> float:
        return self.together.accepted_length

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
        everywhere = accepted_everywhere(drafter, ends, text)
        _add_calibration(found, everywhere)
        walked = walk(everywhere.counts.tolist())
        found.domains[text.trajectory.domain].add(walked, everywhere.survival.shape[1])
    return found


def evaluate_by_temperature(
    drafter: Drafter, ends: TargetEnds, texts: Sequence[Text]
) -> dict[float, Evaluation]:
    """The texts of each temperature by themselves."""
    temperatures = sorted({text.trajectory.temperature for text in texts})
    return {
        temperature: evaluate(
            drafter, ends, [t for t in texts if t.trajectory.temperature == temperature]
        )
        for temperature in temperatures
    }


@dataclass(frozen=True)
class Everywhere:
    """The blocks at all A anchors of a text's answer, with K places each."""

    counts: Tensor  # [A] int64, leading drafts that are right
    survival: Tensor  # [A, K] float32, as the head sees it
    valid: Tensor  # [A, K] bool, places inside the text


def accepted_everywhere(drafter: Drafter, ends: TargetEnds, text: Text) -> Everywhere:
    length = len(text.token_ids)
    anchors = list(anchor_range(text, length))
    batch = make_batch([text], [anchors], drafter.config.block_size, length)
    with mixed_precision():
        blocks = draft(drafter, ends, batch)
        states = chain_states(drafter, blocks.hidden, ends.embedding[blocks.tokens[:, :-1]])
        logits = functional.linear(states, ends.head)
    scores = _with_noise(logits.float(), text, batch.anchors[0], ends)
    right = scores.argmax(-1) == ends.column_of[blocks.tokens[:, 1:]]
    matches = right & blocks.valid
    estimate = drafter.head.estimate(blocks.hidden.float())
    counts = (reached_places(matches) & matches).sum(dim=1)
    return Everywhere(counts, estimate.conditional.cumprod(dim=1), blocks.valid)


def _with_noise(logits: Tensor, text: Text, anchors: Tensor, ends: TargetEnds) -> Tensor:
    """As the server's drafter chooses; see docs/decisions/004. logits: [A, K, V]."""
    temperature, seed = text.trajectory.temperature, text.trajectory.seed
    if temperature == 0:
        return logits
    keys = [noise_keys(seed, position) for position in range(len(text.token_ids))]
    noise = gumbel_noise(torch.tensor(keys), ends.token_ids.int())  # [T, V]
    places = anchors[:, None] + torch.arange(1, logits.shape[1] + 1)
    return logits / temperature + noise[places.clamp(max=len(noise) - 1)]


def walk(accepted: Sequence[int]) -> Sequence[int]:
    """Of the counts at all anchors, those at which the server would draft."""
    taken, place = [], 0
    while place < len(accepted):
        taken.append(accepted[place])
        place += accepted[place] + 1
    return taken


def _add_calibration(found: Evaluation, blocks: Everywhere) -> None:
    places = torch.arange(1, blocks.survival.shape[1] + 1)
    survived = (blocks.counts[:, None] >= places)[blocks.valid].double()
    expected = blocks.survival[blocks.valid].double()
    chosen = (expected * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    for number, totals in enumerate(found.bins):
        inside = chosen == number
        totals[0] += float(inside.sum())
        totals[1] += float(expected[inside].sum())
        totals[2] += float(survived[inside].sum())
