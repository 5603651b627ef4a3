"""Acceptance. No tensors.

With shared noise the target's choice at each position is what plain decoding would have emitted
there, given that all drafts before it were right; so a draft is accepted while it equals it.
"""

from collections.abc import Sequence


def count_accepted(choice_ids: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading drafts to keep. `choice_ids[j]` was chosen after the first j drafts."""
    assert len(choice_ids) == len(drafts) + 1
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choice_ids[accepted]:
        accepted += 1
    return accepted
