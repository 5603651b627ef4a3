"""Tokenizers from GGUF files and folders, held against transformers where it can read the same."""

import json
from pathlib import Path

import gguf
import pytest
from transformers import PreTrainedTokenizerFast

from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.errors import CheckpointError
from adaflash.server.settings import default_cache_dir
from adaflash.server.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  leading and   inner   spaces  ",
    "tabs\tand\n\n\nlines\r\n",
    "👩‍👩‍👧 🇨🇭 é à ộ 日本語 عربي हिन्दी",
    "def f(x):\n    return x**2  # squared\n",
    "3.14159 1,000,000 0x7f 10%",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def default_path() -> Path:
    return locate(
        DEFAULT_MODEL, cache_dir=default_cache_dir(), on_progress=lambda done, total: None
    )


@pytest.fixture(scope="module")
def default(default_path: Path) -> Tokenizer:
    return load_tokenizer(default_path)


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_s_ids_are_transformers(default_path: Path, text: str) -> None:
    """transformers reads the file with its own code; special tokens are then told to it."""
    ours, oracle = load_tokenizer(default_path), read_by_transformers(default_path)
    assert ours.encode(text, add_special_tokens=False) == oracle.encode(
        text, add_special_tokens=False
    )


_ORACLES: dict[Path, PreTrainedTokenizerFast] = {}


def read_by_transformers(path: Path) -> PreTrainedTokenizerFast:
    if path not in _ORACLES:
        from transformers import AutoTokenizer

        _ORACLES[path] = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return _ORACLES[path]


def test_the_default_model_s_facts(default: Tokenizer) -> None:
    assert (default.vocab_size, default.bos_token_id, default.eos_token_id) == (49152, 1, 2)
    assert len(default.special_ids) == 17
    for text in TEXTS:
        ids = default.encode(text, add_special_tokens=False)
        assert default.decode(ids, skip_special_tokens=False) == text
    template = default.chat_template
    assert template is not None
    rendered = template.render([{"role": "user", "content": "Hi"}])
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_token_bytes_join_to_the_text(default: Tokenizer) -> None:
    text = "naïve 🙂 café"
    ids = default.encode(text, add_special_tokens=False)
    assert b"".join(map(default.token_bytes, ids)).decode() == text
    assert default.token_text(2) == "<|im_end|>"
    assert default.token_bytes(10**6) == b""  # pads the model's vocabulary


def write_gguf(path: Path, **changes: object) -> Path:
    """A little SentencePiece vocabulary, as llama.cpp's converter writes it."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "o▁"]
    scores = [-9.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0, -5.0, -0.5]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(str(changes.get("model", "llama")))
    writer.add_tokenizer_pre(str(changes.get("pre", "default")))
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(bool(changes.get("add_space_prefix", True)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf"))

    def pieces(text: str) -> list[str]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [tokenizer.token_bytes(id_).decode(errors="replace") for id_ in ids]

    assert pieces("hello") == [" hello"]
    # "o▁" has the best score of all and takes the first o before "hello" can.
    assert pieces("hello hello") == [" ", "hell", "o ", "hello"]
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    assert ids[0] == 1  # BOS by default
    assert [tokenizer.token_bytes(id_) for id_ in ids[-2:]] == ["é".encode()[:1], "é".encode()[1:]]
    assert tokenizer.decode(ids) == "hello é"


def test_no_space_prefix_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", add_space_prefix=False))
    (token,) = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.token_bytes(token) == b"hello"


@pytest.mark.parametrize("change", [{"model": "bert"}, {"model": "gpt2", "pre": "mystery"}])
def test_unknown_kinds_are_named(change: dict[str, str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", **change)
    with pytest.raises(CheckpointError, match=[*change.values()][-1]):
        load_tokenizer(path)


def test_a_folder_s_template_can_lie_beside_its_config(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    inside = load_tokenizer(folder).chat_template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_template is None
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    beside = load_tokenizer(folder).chat_template
    assert inside is not None
    assert beside is not None
    message = [{"role": "user", "content": "x"}]
    assert inside.render(message) == beside.render(message)
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    named = load_tokenizer(folder).chat_template
    assert named is not None
    assert named.render(message) == "plain"
