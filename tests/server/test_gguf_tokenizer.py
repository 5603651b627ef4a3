"""Tokenizers from small GGUF files, written as llama.cpp's converter writes them."""

import json
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import Qwen2Converter

from adaflash.engine.errors import CheckpointError
from adaflash.server.tokenizer import Tokenizer, load_tokenizer

SCORES = {"▁": -9.0, "h": -9.0, "e": -9.0, "l": -9.0, "o": -9.0} | {
    "he": -1.0,
    "ll": -2.0,
    "hell": -3.0,
    "hello": -4.0,
    "▁hello": -5.0,
    "o▁": -0.5,
}
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

Value = bool | int | str | list[str] | list[int] | list[float]  # of one metadata field
Learnt = tuple[dict[str, int], list[tuple[str, str]]]  # vocabulary and merges


def sentencepiece(**changes: Value) -> dict[str, Value]:
    return {
        "model": "llama",
        "tokens": [*SPECIALS, *BYTES, *SCORES],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(SCORES)],
        "scores": [*[0.0] * 259, *SCORES.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def byte_level(pre: str, learnt: Learnt) -> dict[str, Value]:
    vocabulary, merges = learnt
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*words, "<|end|>", "<tool>"],
        "token_type": [*[1] * len(words), 3, 4],
        "merges": [f"{left} {right}" for left, right in merges],
        "bos_token_id": len(words),
        "eos_token_id": len(words),
    }


def write(path: Path, fields: dict[str, Value]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def learnt() -> Learnt:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    corpus = [
        "some words and SOME more, it's 2024 or 12345;\n\n  x = [1, 22, 333]\r\n",
        "é ệ 日本語",
    ]
    inner.train_from_iterator(corpus * 4, trainer)
    merges = json.loads(inner.to_str())["model"]["merges"]
    return inner.get_vocab(), [(left, right) for left, right in merges]


PIECES = [
    "some",
    " words",
    "'s",
    "'S",
    " 12345",
    "7",
    "\r\n",
    "\n",
    "   ",
    "\t",
    "x=[",
    "e\u0301",
    "語",
]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES)).map("".join))


def load(folder: Path, fields: dict[str, Value]) -> Tokenizer:
    return load_tokenizer(write(folder / "model.gguf", fields))


def names(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.token_text(id_) for id_ in ids]


def by_scores(text: str) -> list[str]:
    """SentencePiece's rule: join the neighbours that make the best token, until none do."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        found = [(-SCORES[token], index) for index, token in enumerate(joined) if token in SCORES]
        if not found:
            return pieces
        _, index = min(found)
        pieces[index : index + 2] = [joined[index]]


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from(["hello", "he", "l", "o", " ", "é", "🙂"])).map("".join))
@example(text="hello hello")  # "o▁" takes the first o before "hello" can
def test_sentencepiece_merges_follow_the_scores(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    tokenizer = load(tmp_path_factory.getbasetemp(), sentencepiece())
    expected = [
        piece if piece in SCORES else byte
        for piece in by_scores(text)
        for byte in ([piece] if piece in SCORES else [f"<0x{b:02X}>" for b in piece.encode()])
    ]
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = [*SPECIALS, *BYTES, *SCORES]
    assert [tokens[id_] for id_ in ids] == expected
    assert tokenizer.decode(ids) == text


def test_sentencepiece_puts_the_start_token_first(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece())
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == {0, 1, 2}
    e_acute = tokenizer.encode("é", add_special_tokens=False)[-2:]
    assert [tokenizer.token_bytes(id_) for id_ in e_acute] == [b"\xc3", b"\xa9"]


def test_no_space_prefix_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece(add_space_prefix=False))
    assert names(tokenizer, "hello") == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False)) == " hello"


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_eos_token": True}, [1], [2]),
    ],
)
def test_the_file_says_what_goes_around_a_text(
    fields: dict[str, Value], before: list[int], after: list[int], tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, sentencepiece(**fields))
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == [*before, *bare, *after]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts)
def test_qwen2_splits_like_transformers(
    tmp_path_factory: pytest.TempPathFactory, learnt: Learnt, text: str
) -> None:
    tokenizer = load(tmp_path_factory.getbasetemp(), byte_level("qwen2", learnt))
    oracle = Qwen2Converter(None).converted(*learnt)
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text).ids


def test_the_kinds_differ_in_digits_and_start_tokens(tmp_path: Path, learnt: Learnt) -> None:
    def found(pre: str, text: str) -> list[str]:
        return names(load(tmp_path, byte_level(pre, learnt)), text)

    assert found("smollm", " 12345") == [" ", *"12345"]
    assert found("gpt-2", " 12345") == [" 12345"]
    assert found("qwen2", " 12345") == [" ", *"12345"]
    assert found("llama-bpe", "1212") == ["12", "1", "2"]
    assert found("gpt-2", "1212") == ["12", "12"]
    for pre, starts in {"llama-bpe": True, "qwen2": False, "smollm": False}.items():
        tokenizer = load(tmp_path, byte_level(pre, learnt))
        ids = tokenizer.encode("x", add_special_tokens=True)
        assert (ids[0] == tokenizer.bos_token_id) is starts


def test_llama3_takes_words_that_no_merge_leads_to(tmp_path: Path, learnt: Learnt) -> None:
    vocabulary, merges = learnt
    with_word = ({**vocabulary, "zyx": len(vocabulary)}, merges)
    assert names(load(tmp_path, byte_level("llama-bpe", with_word)), "zyx") == ["zyx"]
    assert names(load(tmp_path, byte_level("gpt-2", with_word)), "zyx") == ["z", "y", "x"]


def test_user_defined_tokens_are_whole_but_not_special(tmp_path: Path, learnt: Learnt) -> None:
    tokenizer = load(tmp_path, byte_level("qwen2", learnt))
    ids = tokenizer.encode("a<tool>b<|end|>", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.special_ids == {ids[3]}
    assert tokenizer.decode(ids) == "a<tool>b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": "gpt2", "pre": "mystery"}, "'mystery' is not supported"),
        ({"model": "gpt2", "merges": ["zz yy"]}, "out of vocabulary"),
        ({"bos_token_id": 9999}, "token 9999 is none of"),
        ({"token_type": [1]}, "shorter"),
        ({"tokens": "hello"}, "Expected `array`"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Value], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, sentencepiece(**change))


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", sentencepiece())
    whole = path.read_bytes()
    for content in (b"", b"GGUF", b"PK" + whole[2:], whole[:-100], whole[:4] + b"\xff" + whole[5:]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="as GGUF"):
            load_tokenizer(path)
