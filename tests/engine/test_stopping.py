"""Endings inside a run of several emitted tokens."""

import pytest

from adaflash.engine.stopping import Ending, ModelLimits, find_ending
from adaflash.engine.types import FinishReason, Request, SamplingParams, Sequence

LIMITS = ModelLimits(vocab_size=32, eos_token_ids=frozenset({0}), max_model_len=20)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("emitted", "changes", "expected"),
    [
        ([5, 6, 7], {}, Ending(3)),
        ([5, 0, 7], {}, Ending(2, STOP)),
        ([5, 0, 7], {"ignore_eos": True}, Ending(3)),
        ([5, 9, 0], {"stop_token_ids": frozenset({9})}, Ending(2, STOP, 9)),
        ([5, 6, 7], {"max_tokens": 2}, Ending(2, LENGTH)),
        ([5, 0, 7], {"max_tokens": 2}, Ending(2, STOP)),  # both at once: the stop wins
        ([5, 6, 0], {"max_tokens": 2}, Ending(2, LENGTH)),  # a stop beyond the budget is not seen
        ([0], {"stop_token_ids": frozenset({0})}, Ending(1, STOP, 0)),
    ],
)
def test_endings(emitted: list[int], changes: dict[str, object], expected: Ending) -> None:
    sampling = SamplingParams(**{"seed": 0, "max_tokens": 10, **changes})  # type: ignore[arg-type]
    request = Request(request_id="a", prompt_ids=[1, 2], sampling=sampling)
    assert find_ending(Sequence(request, order=0), emitted, LIMITS) == expected


def test_the_context_is_a_limit_too() -> None:
    request = Request(
        request_id="a", prompt_ids=[1] * 18, sampling=SamplingParams(seed=0, max_tokens=10)
    )
    assert find_ending(Sequence(request, order=0), [5, 6, 7], LIMITS) == Ending(2, LENGTH)
