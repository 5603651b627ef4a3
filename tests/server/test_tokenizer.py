"""Tokenizers from GGUF files and folders, held against transformers where it can read the same."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


@pytest.fixture(scope="module")
def oracle(default_path: Path) -> PreTrainedTokenizerFast:
    """The same file, read by transformers' own code."""
    return AutoTokenizer.from_pretrained(default_path.parent, gguf_file=default_path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_s_ids_are_transformers(
    default: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    ids = default.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False)


# transformers overlooks that this model's digits stand alone; only for ASCII's it is the same.
NO_OTHER_DIGITS = st.characters(exclude_categories=("Cs", "N")) | st.sampled_from("0123456789 \n")


@settings(max_examples=300, deadline=None)
@given(text=st.text(NO_OTHER_DIGITS, max_size=40))
def test_ids_of_any_text_are_transformers(
    default: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    ids = default.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False)


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


def test_a_folder_s_training_limits_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    limited = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    limited.enable_truncation(4)
    limited.enable_padding(length=16)
    limited.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("ten tokens", add_special_tokens=False)) == 10


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


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
