"""Streams of text: whole characters, nothing of a stop string, and no difference to the whole."""

import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.server.settings import default_cache_dir
from adaflash.server.text import TextStream
from adaflash.server.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer
from tests.server.app_client import tokenizer as byte_tokenizer


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    """The default model's: byte-level BPE."""
    path = locate(
        DEFAULT_MODEL, cache_dir=default_cache_dir(), on_progress=lambda done, total: None
    )
    return load_tokenizer(path)


def no_table() -> Tokenizer:
    """A kind without a byte table, so that the library decodes."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["?", "<end>"])
    inner.train_from_iterator(["some words and some more words to learn from"], trainer)
    return Tokenizer(inner, TokenizerFacts(None, "<end>", None))


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: a few characters, and bytes for all others."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a"]
    ids = {token: id_ for id_, token in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return Tokenizer(inner, TokenizerFacts(None, None, None))


NO_TABLE, BYTE_FALLBACK = no_table(), byte_fallback()


def stream(
    tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], *stop: str, min_tokens: int = 0
) -> tuple[list[str], int, str | None]:
    """Pieces of text, number of tokens that belong to them, and the stop string."""
    under_test = TextStream(tokenizer, stop, min_tokens=min_tokens)
    pieces, count, found = [], 0, None
    for push in pushes:
        piece = under_test.push(push)
        pieces.append(piece.text)
        count += piece.num_tokens
        found = found or piece.stop
    rest = under_test.finish()
    return [*pieces, rest.text], count, found or rest.stop


def splits(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_of_decoding_them_all(
    default: Tokenizer, data: st.DataObject
) -> None:
    """Invalid UTF-8 included: the tokens are random."""
    ids = data.draw(st.lists(st.integers(0, default.vocab_size - 1), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=5))
    pieces, count, _ = stream(default, splits(ids, cuts))
    assert "".join(pieces) == default.decode(ids)
    assert count == len(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_no_piece_holds_half_a_character(text: str, cuts: list[int]) -> None:
    tokenizer = byte_tokenizer()  # one token a byte: every character is split
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, _, _ = stream(tokenizer, splits(ids, cuts))
    expected = tokenizer.decode(ids)
    assert "".join(pieces) == expected
    assert sum(piece.count("\ufffd") for piece in pieces) == expected.count("\ufffd")


@pytest.mark.parametrize("text", ["👩‍👩‍👧🇨🇭🙂👍🏽🏴‍☠️", "é à ộ", "日本語 and عربي", "a\n\n\t  b"])
def test_hard_texts_survive_one_token_at_a_time(default: Tokenizer, text: str) -> None:
    for tokenizer in (default, byte_tokenizer()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces, _, _ = stream(tokenizer, [[id_] for id_ in ids])
        assert "".join(pieces) == text


def test_a_cut_inside_a_character_shows_once_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    pieces, _, _ = stream(tokenizer, [[id_] for id_ in ids])
    assert pieces == ["a", "", "", "", "\ufffd"]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_cut_alike_however_the_tokens_come(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, count, found = stream(tokenizer, splits(ids, cuts), *stop)
    ends = {text.find(s) + len(s): s for s in stop if s in text}
    if not ends:
        assert ("".join(pieces), count, found) == (text, len(ids), None)
        return
    end = min(ends)  # the first character that completes a stop string ends the text
    matches = [s for s in stop if text[:end].endswith(s)]
    longest = max(matches, key=len)
    assert found == longest
    assert "".join(pieces) == text[: end - len(longest)]
    assert count == end  # one token a character


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " quick", " fox", "es", " jump", "ing"]), max_size=12),
    edges=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
@example(words=["the", " quick"], edges=[(3, 2), (3, 4), (4, 1)], cuts=[])
def test_of_several_matches_within_a_token_the_first_counts(
    default: Tokenizer, words: list[str], edges: list[tuple[int, int]], cuts: list[int]
) -> None:
    text = "".join(words) + "."
    stop = [text[start : start + length] or "." for start, length in edges]
    ids = default.encode(text, add_special_tokens=False)
    count = next(n for n in range(len(ids) + 1) if any(s in default.decode(ids[:n]) for s in stop))
    seen = default.decode(ids[:count])
    start, _, first = min((seen.find(s), -len(s), s) for s in stop if s in seen)
    pieces, num_tokens, found = stream(default, splits(ids, cuts), *stop)
    assert ("".join(pieces), num_tokens, found) == (seen[:start], count, first)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("one STO two STOP three", add_special_tokens=False)
    pieces, _, found = stream(tokenizer, [[id_] for id_ in ids], "STOP")
    assert pieces[4:8] == ["", "", "", "STO "]
    assert "".join(pieces) == "one STO two "
    assert found == "STOP"


def test_stop_strings_within_the_least_tokens_do_not_count() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("xyxy-xy", add_special_tokens=False)
    pieces, count, found = stream(tokenizer, [ids], "xy", min_tokens=4)
    assert ("".join(pieces), count, found) == ("xyxy-", 7, "xy")


def test_special_tokens_are_no_text(default: Tokenizer) -> None:
    assert default.eos_token_id is not None
    ids = [*default.encode("Hi", add_special_tokens=False), default.eos_token_id]
    assert "".join(stream(default, [ids])[0]) == "Hi"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokenizers_without_a_byte_table(data: st.DataObject) -> None:
    tokenizer = NO_TABLE
    assert tokenizer.bytes_table is None
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    cuts = data.draw(st.lists(st.integers(0, 12), max_size=4))
    pieces, count, _ = stream(tokenizer, splits(ids, cuts))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert count == len(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text("a é🙂\u0301", max_size=20), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_byte_fallback_keeps_every_character(text: str, cuts: list[int]) -> None:
    """The space at the start too: a continuation is no whole text."""
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False)
    pieces, _, _ = stream(BYTE_FALLBACK, splits(ids, cuts))
    assert "".join(pieces) == text


def test_time_is_linear_in_the_number_of_tokens() -> None:
    """By work, not by clock: what is searched stays as short as the longest stop string."""
    tokenizer = byte_tokenizer()
    under_test = TextStream(tokenizer, ["x" * 50] * 16)
    ids = tokenizer.encode("x" * 49 + "y", add_special_tokens=False)
    for _ in range(50):
        under_test.push(ids)
        assert len(under_test._held) <= 50
