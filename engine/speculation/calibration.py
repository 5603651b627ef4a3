"""Survival, calibrated by what verification shows. No torch.

For each position, the head's logit is shifted by the intercept of a logistic regression on the
newest outcomes there, with a weak prior towards no shift. An outcome is seen where the target got
to: up to the first rejected draft, and no further than what was verified.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WINDOW = 256  # newest outcomes of a position
PRIOR_VARIANCE = 9.0  # of a shift, in logits squared
NEWTON_STEPS = 3
MAX_STEP = 1.0  # logits
EDGE = 1e-4  # chances are kept this far from 0 and 1


class Calibration:
    """Shifts for positions 1 .. num_positions of a block."""

    def __init__(self, num_positions: int) -> None:
        self.shift: Floats = np.zeros(num_positions)
        self._logits: Floats = np.zeros((num_positions, WINDOW))
        self._labels: Floats = np.zeros((num_positions, WINDOW))
        self._counts: Ints = np.zeros(num_positions, dtype=np.int64)  # outcomes ever seen

    def survival(self, conditional: Floats) -> Floats:
        """P(all drafts up to j are accepted) from the head's conditional chances, both [R, J]."""
        shift = self.shift[: conditional.shape[1]]
        return np.cumprod(sigmoid(logit(conditional) + shift), axis=1, dtype=np.float64)

    def learn(self, conditional: Floats, lengths: Ints, accepted: Ints) -> None:
        """Outcomes of R blocks: of `lengths` verified drafts, the first `accepted` were right."""
        logits = logit(conditional)
        for index in range(conditional.shape[1]):
            position = index + 1
            reached = (lengths >= position) & (accepted >= position - 1)
            if reached.any():
                self._remember(index, logits[reached, index], accepted[reached] >= position)
        self._fit()

    def _remember(self, index: int, logits: Floats, labels: NDArray[np.bool_]) -> None:
        places = (self._counts[index] + np.arange(len(logits))) % WINDOW
        self._logits[index, places] = logits
        self._labels[index, places] = labels
        self._counts[index] += len(logits)

    def _fit(self) -> None:
        """A few Newton steps towards the most likely shifts, from where they are."""
        seen = np.arange(WINDOW) < self._counts[:, None]
        for _ in range(NEWTON_STEPS):
            chance = sigmoid(self._logits + self.shift[:, None])
            gradient = ((self._labels - chance) * seen).sum(axis=1) - self.shift / PRIOR_VARIANCE
            curvature = (chance * (1 - chance) * seen).sum(axis=1) + 1 / PRIOR_VARIANCE
            self.shift = self.shift + np.clip(gradient / curvature, -MAX_STEP, MAX_STEP)


def logit(chance: Floats) -> Floats:
    inside = np.clip(chance, EDGE, 1 - EDGE)
    found: Floats = np.log(inside / (1 - inside))
    return found


def sigmoid(logits: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-logits))
    return found
