"""The acceptance rule, and a step whose rows carry drafts."""

import pytest

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.sampler import ChoiceRow, Sampler
from adaflash.engine.speculation.accept import count_accepted
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence
from tests.engine.toy import VOCAB, ToyTarget, request, run, text, toy_engine


@pytest.mark.parametrize(
    ("choices", "drafts", "emitted"),
    [
        ([4], [], [4]),
        ([4, 5, 6], [4, 5], [4, 5, 6]),
        ([4, 5, 6], [4, 9], [4, 5]),
        ([4, 5, 6], [9, 5], [4]),
    ],
)
def test_drafts_are_kept_while_they_equal_the_choice(
    choices: list[int], drafts: list[int], emitted: list[int]
) -> None:
    assert choices[: count_accepted(choices, drafts) + 1] == emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_behind_right_drafts_are_those_of_plain_decoding(temperature: float) -> None:
    """Verifying what plain decoding went on to write accepts all of it, at any temperature."""
    sampling = SamplingParams(
        seed=5, max_tokens=6, temperature=temperature, presence_penalty=1.0, ignore_eos=True
    )
    asked: Request = request("a", [1, 2, 3], sampling)
    plain = text(run(toy_engine(), [asked])["a"])
    sequence = Sequence(asked, order=0, num_committed=2)
    row = VerifyRow(Row(sequence, 2, 1, RowKind.VERIFY), tuple(plain[:5]))
    logits = ToyTarget().verify([row]).logits
    positions = [ChoiceRow(sequence, row.drafts[:count]) for count in range(row.num_logits)]
    choices = Sampler(VOCAB, frozenset()).choose(logits, positions)
    ids = [choice.token_id for choice in choices]
    assert count_accepted(ids, row.drafts) == 5
    assert ids == plain
