"""Suffix indexes: what they find is real, the longest and newest, and they stay as large as they
are."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaflash.engine.speculation import suffixes
from adaflash.engine.speculation.suffixes import (
    LONGEST,
    MAX_MATCH,
    SHORTEST,
    Match,
    ReplyStore,
    SuffixTable,
    TextIndex,
    keys_of,
)

MANY_SLOTS = 2**16
FEW_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def same_before(text: list[int], end: int, tail: list[int]) -> int:
    """How many tokens up to `end` are those at the end of `tail`."""
    count = 0
    while count < min(MAX_MATCH, end + 1, len(tail)) and text[end - count] == tail[~count]:
        count += 1
    return count


def best_end(text: list[int], ends: list[int], tail: list[int]) -> int | None:
    """By trying all: the newest of those before which the most is the same, up to LONGEST."""
    matches = [(min(LONGEST, same_before(text, end, tail)), end) for end in ends]
    length, end = max(matches, default=(0, 0))
    return end if length >= SHORTEST else None


def collide(texts: list[list[int]], num_slots: int) -> bool:
    """Whether two n-grams of one length share a slot."""
    shift = suffixes.KEY_BITS - (num_slots.bit_length() - 1)
    grams: dict[tuple[int, int], tuple[int, ...]] = {}
    for text in texts:
        for end in range(len(text)):
            for index, key in enumerate(keys_of(text[: end + 1])):
                gram = tuple(text[end + 1 - index - SHORTEST : end + 1])
                if grams.setdefault((index, key >> shift), gram) != gram:
                    return True
    return False


def find(index: TextIndex, text: list[int], count: int) -> Match | None:
    return index.find(text, keys_of(text[-LONGEST:]), count)


@settings(max_examples=150, deadline=None)
@given(FEW_TOKENS, st.lists(st.integers(1, 9), max_size=60), st.integers(1, 9))
def test_a_text_is_continued_as_after_its_longest_and_newest_match(
    text: list[int], strides: list[int], count: int
) -> None:
    """While it grows by some tokens at a time."""
    assume(not collide([text], MANY_SLOTS))
    index = TextIndex()
    index._table = SuffixTable(MANY_SLOTS)
    lengths = sorted({min(int(n), len(text)) for n in np.cumsum([*strides, len(text)])})
    for length in lengths:
        known = text[:length]
        found = find(index, known, count)
        end = best_end(known, list(range(length - 1)), known)
        if end is None:
            assert found is None
            continue
        going_on = list(known)
        for place in range(end + 1, end + 1 + count):
            going_on.append(going_on[place])
        expected = Match(same_before(known, end, known), tuple(going_on[length:]), is_own=True)
        assert found == expected


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 40))
def test_whatever_is_forgotten_what_is_found_is_real(data: st.DataObject, num_tokens: int) -> None:
    """In tables so small that most places are forgotten."""
    text = data.draw(st.lists(st.integers(0, num_tokens), min_size=1, max_size=300))
    index = TextIndex()
    index._table = SuffixTable(8)
    for length in range(1, len(text) + 1, 3):
        known = text[:length]
        found = find(index, known, 4)
        if found is not None:
            places = [
                end
                for end in range(length - 1)
                if same_before(known, end, known) == found.num_tokens
                and (known[end + 1 : end + 5] * 4)[:4] == list(found.continuation)
            ]
            assert places


@given(FEW_TOKENS, st.integers(0, 50))
def test_all_at_once_is_as_one_by_one(text: list[int], first: int) -> None:
    one_by_one, at_once = SuffixTable(16), SuffixTable(16)
    for end in range(len(text)):
        one_by_one.put(keys_of(text[: end + 1]), first + end)
    at_once.put_all(np.array(text), np.arange(first, first + len(text)))
    assert (one_by_one._ends == at_once._ends).all()


def test_a_long_text_is_taken_in_once_and_grows() -> None:
    """A prompt at once, then token by token, past the size of the table."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50_000, 4000).tolist()
    text += text[1000:1400]
    index = TextIndex()
    for length in (3000, 3001, 3900, *range(4000, 4020)):
        assert length > 4002 or find(index, text[:length], 8) is None
    for length in range(4020, 4400):
        found = find(index, text[:length], 8)
        assert found is not None
        assert found.num_tokens == min(MAX_MATCH, length - 4000)
        assert list(found.continuation) == text[length - 3000 : length - 2992]
    assert index._table._ends.nbytes <= 56 * len(text)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_what_repeats_itself_is_taken_to_go_on(period: int) -> None:
    text = (list(range(10, 10 + period)) * 21)[:21]
    found = find(TextIndex(), text, 8)
    assert found is not None
    assert list(found.continuation) == [10 + (21 + place) % period for place in range(8)]


def test_asked_twice_it_says_nothing_of_the_text_itself() -> None:
    index, text = TextIndex(), [1, 2, 3, 1, 2]
    assert find(index, text, 3) == Match(2, (3, 1, 2), is_own=True)
    assert find(index, text, 3) == Match(2, (3, 1, 2), is_own=True)


REPLIES = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=8)


@settings(max_examples=150, deadline=None)
@given(REPLIES, st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_of_stored_replies_the_longest_and_newest_match_is_found(
    replies: list[list[int]], tail: list[int]
) -> None:
    assume(not collide([*replies, tail], MANY_SLOTS))
    store = ReplyStore(MANY_SLOTS)
    stored: list[int] = []
    for reply in replies:
        store.add(reply)
        stored += [*reply, suffixes.END] if len(reply) > SHORTEST else []
    found = store.find(tail, keys_of(tail[-LONGEST:]), 5)
    # A place at the end of a reply is the newest of its n-gram all the same, and of no use.
    newest = [
        max((e for e in range(len(stored)) if same_before(stored, e, tail) >= length), default=None)
        for length in range(LONGEST, SHORTEST - 1, -1)
    ]
    ends = [end for end in newest if end is not None and stored[end + 1] != suffixes.END]
    if not ends:
        assert found is None
        return
    following = stored[ends[0] + 1 : ends[0] + 6]
    following = (
        following[: following.index(suffixes.END)] if suffixes.END in following else following
    )
    assert found == Match(same_before(stored, ends[0], tail), tuple(following), is_own=False)


def test_the_oldest_replies_go_and_memory_stays() -> None:
    store = ReplyStore(1000)
    size = store._tokens.nbytes + store._table._ends.nbytes
    assert size <= 60 * 1000
    replies = np.random.default_rng(0).integers(0, 50_000, (200, 90)).tolist()
    num_found = np.zeros(30, dtype=np.int64)
    for number, reply in enumerate(replies):
        store.add(reply)
        for age, older in enumerate(replies[number::-1][:30]):
            found = store.find(older[:40], keys_of(older[32:40]), 3)
            assert found is None or list(found.continuation) == older[40:43]
            num_found[age] += found is not None
    # 10 to 11 replies of 91 tokens fit. A few places are forgotten to newer ones before.
    assert (num_found[:10] > 0.9 * len(replies) - 10).all()
    assert (num_found[11:] == 0).all()
    assert store._tokens.nbytes + store._table._ends.nbytes == size


def test_of_a_reply_longer_than_the_store_the_end_is_kept() -> None:
    store = ReplyStore(50)
    reply = list(range(200))
    for _ in range(3):
        store.add(reply)
        assert store.find(reply[:190], keys_of(reply[182:190]), 4) is not None
        assert store.find(reply[:100], keys_of(reply[92:100]), 4) is None


def test_what_is_too_short_to_be_found_is_not_stored() -> None:
    store = ReplyStore(50)
    for reply in ([], [1], [1, 2]):
        store.add(reply)
    assert store._next == 0
