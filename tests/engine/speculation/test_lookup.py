"""The lookup as a draft source: whose text it takes, and what it thinks of its guesses."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash.engine.speculation import lookup
from adaflash.engine.speculation.budget import Guesses
from adaflash.engine.speculation.lookup import CLASSES, Lookup, SuccessRates
from adaflash.engine.speculation.suffixes import Match
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence

NO_SHIFT = np.zeros(1)


def row_of(tokens: list[int], *, num_prompt: int = 1) -> Row:
    sampling = SamplingParams(seed=0, max_tokens=1000)
    request = Request(request_id="a", prompt_ids=tokens[:num_prompt], sampling=sampling)
    sequence = Sequence(request, 0)
    sequence.token_ids += tokens[num_prompt:]
    return Row(sequence, len(tokens) - 1, 1, RowKind.VERIFY, 8)


def chances(guesses: Guesses) -> list[list[float]]:
    found: list[list[float]] = guesses.conditional.tolist()
    return found


def test_a_row_s_guess_is_what_its_own_text_says() -> None:
    source = Lookup(3, store_tokens=0)
    rows = [row_of([1, 2, 3, 4, 1, 2]), row_of([5, 6, 7, 8]), row_of([9])]
    guesses = source.guess(rows)
    assert guesses.matches == (Match(2, (3, 4, 1), is_own=True), None, None)
    assert guesses.drafts(np.array([2, 0, 0])) == {rows[0]: (3, 4)}
    assert chances(guesses)[1:] == [[0, 0, 0]] * 2
    assert chances(guesses)[0] == pytest.approx([2 / 4, 3 / 5, 4 / 6])


def test_other_requests_texts_are_known_once_they_have_ended_and_only_replies() -> None:
    prompt, reply = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]
    written = row_of([*prompt, *reply], num_prompt=5).sequence
    with_store, without = Lookup(3, store_tokens=100), Lookup(3, store_tokens=0)
    for source in (with_store, without):
        assert source.guess([row_of([0, 11, 12, 13])]).matches == (None,)
        source.remember(written)
        assert source.guess([row_of([0, 2, 3, 4])]).matches == (None,)
    assert without.guess([row_of([0, 11, 12, 13])]).matches == (None,)
    found = with_store.guess([row_of([0, 11, 12, 13])])
    assert found.matches == (Match(3, (14, 15), is_own=False),)
    assert chances(found)[0] == pytest.approx([3 / 10, 4 / 11, 0])


def test_of_two_texts_the_one_that_has_been_right_more_often_counts() -> None:
    """At first a text's own match of 2 tokens is worth as much as one of 7 in a reply."""
    source = Lookup(2, store_tokens=100)
    own, reply = [1, 2, 50, 9, 9, 9, 3, 4, 5, 6, 7, 1, 2], [9, 3, 4, 5, 6, 7, 1, 2, 60, 61]
    source.remember(row_of([0, *reply]).sequence)
    (first,) = source.guess([row_of(own)]).matches
    assert first == Match(8, (60, 61), is_own=False)
    for _ in range(200):  # and it is never right
        row = row_of(own)
        guesses = source.guess([row])
        source.learn(guesses, [[99]])
        if guesses.matches[0] != first:
            break
    assert guesses.matches == (Match(2, (50, 9), is_own=True),)


def test_a_sequence_s_index_goes_with_it() -> None:
    source = Lookup(3, store_tokens=10)
    rows = [row_of([1, 2, 1, 2]) for _ in range(5)]
    source.guess(rows)
    assert len(source._readers) == 5
    del rows[1:]
    gc.collect()
    assert len(source._readers) == 1


def match(num_tokens: int, *, is_own: bool = True, length: int = 4) -> Match:
    return Match(num_tokens, tuple(range(length)), is_own)


def learn(rates: SuccessRates, matches: list[Match], tried: list[int], right: list[int]) -> None:
    rates.learn(matches, np.array(tried), np.array(right))


@pytest.mark.parametrize("truth", [0.02, 0.4, 0.97])
def test_the_truth_of_a_class_and_position_is_found(truth: float) -> None:
    """From outcomes that are seen only up to the first wrong draft. Others keep their prior."""
    rates, rng = SuccessRates(3), np.random.default_rng(0)
    for _ in range(4000):
        right = int(np.cumprod(rng.random(3) < truth).sum())
        learn(rates, [match(5)], [min(right + 1, 3)], [right])
    found = rates.conditional([match(5)], NO_SHIFT)[0]
    assert found[0] == pytest.approx(truth, abs=0.05)
    if truth > 0.3:
        assert found == pytest.approx([truth] * 3, abs=0.08)
    other = rates.conditional([match(5, is_own=False)], NO_SHIFT)[0]
    assert other == pytest.approx([5 / 12, 6 / 13, 7 / 14])


def test_what_changes_is_noticed() -> None:
    rates = SuccessRates(1)
    for _ in range(5000):
        learn(rates, [match(8)], [1], [1])
    for _ in range(1000):
        learn(rates, [match(8)], [1], [0])
    assert rates.conditional([match(8)], NO_SHIFT)[0, 0] < 0.2


@given(st.integers(2, 40), st.booleans(), st.integers(1, 8), st.floats(-3, 3))
def test_chances_are_chances_and_end_with_the_continuation(
    num_tokens: int, is_own: bool, length: int, shift: float
) -> None:
    rates = SuccessRates(8)
    found = rates.conditional(
        [match(num_tokens, is_own=is_own, length=length), None], np.array([shift] * 2)
    )
    assert ((found[0, :length] > 0) & (found[0, :length] < 1)).all()
    assert (found[0, length:] == 0).all()
    assert (found[1] == 0).all()


def test_longer_matches_and_later_drafts_promise_more_at_first() -> None:
    rates = SuccessRates(4)
    for is_own in (True, False):
        table = rates.conditional(
            [match(least, is_own=is_own) for least in CLASSES], np.zeros(len(CLASSES))
        )
        assert (np.diff(table, axis=0) > 0).all()
        assert (np.diff(table, axis=1) > 0).all()


def test_what_was_not_verified_teaches_as_far_as_the_text_went_on() -> None:
    """One token is emitted by every row, whatever was verified."""
    source = Lookup(3, store_tokens=0)
    row = row_of([1, 2, 3, 4, 1, 2])
    guesses = source.guess([row])
    before = chances(guesses)[0]
    source.learn(guesses, [[3]])
    again = chances(source.guess([row_of([1, 2, 3, 4, 1, 2])]))[0]
    assert again[0] > before[0]
    assert again[1:] == pytest.approx(before[1:])
    source.learn(guesses, [[3, 8]])
    again = chances(source.guess([row_of([1, 2, 3, 4, 1, 2])]))[0]
    assert again[1] < before[1]
    assert again[2] == pytest.approx(before[2])


def test_a_request_that_does_not_repeat_itself_is_told_from_one_that_does() -> None:
    """By its own outcomes; what all have in common is in the table."""
    source = Lookup(1, store_tokens=0)
    text = [1, 2, 3, 4, 1, 2]
    faithful, fickle = row_of(text), row_of(text)
    for _ in range(40):
        guesses = source.guess([faithful, fickle])
        source.learn(guesses, [[3], [9]])
    assert chances(source.guess([faithful]))[0][0] > 0.75
    assert chances(source.guess([fickle]))[0][0] < 0.25
    assert lookup.MAX_SHIFT >= abs(source._reader_of(fickle.sequence).shift) > 0.5


def test_a_step_without_decoding_rows_is_nothing_to_guess() -> None:
    source = Lookup(3, store_tokens=10)
    guesses = source.guess([])
    assert guesses.conditional.shape == (0, 3)
    source.learn(guesses, [])
