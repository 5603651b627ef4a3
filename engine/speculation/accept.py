"""Acceptance. No tensors.

With shared noise the target's choice at each position is what plain decoding would have emitted
there, given that all drafts before it were right; so a draft is accepted while it equals it.
"""

from collections.abc import Sequence
from typing import TypeVar

ChoiceT = TypeVar("ChoiceT")


def accept(
    choices: Sequence[ChoiceT], choice_ids: Sequence[int], drafts: Sequence[int]
) -> Sequence[ChoiceT]:
    """The choices to emit: those after accepted drafts, and the one that ends the run.

    `choices[j]` (token `choice_ids[j]`) was made after the first j drafts.
    """
    assert len(choices) == len(choice_ids) == len(drafts) + 1
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choice_ids[accepted]:
        accepted += 1
    return choices[: accepted + 1]
