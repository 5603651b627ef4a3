"""Text to token ids and back, from a Hugging Face folder or a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from adaflash.engine.errors import CheckpointError
from adaflash.server.chat_template import ChatTemplate
from adaflash.server.gguf_tokenizer import read_gguf_tokenizer
from adaflash.server.token_bytes import token_bytes_of


@dataclass(frozen=True)
class TokenizerFacts:
    """What a tokenizer needs besides its vocabulary and merges."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Tokenizer:
    """Safe to use from several threads.

    Special tokens written out in a text are encoded as special tokens, as transformers and vLLM
    do: a chat template relies on it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.bos_token_id = self._id_of(facts.bos_token)
        self.eos_token_id = self._id_of(facts.eos_token)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(map(len, vocabulary))  # characters
        # The bytes of each token, if this kind of tokenizer decodes token by token.
        self.bytes_table = token_bytes_of(tokenizer)
        self.chat_template = self._template(facts.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. add_special_tokens: what the model puts around plain text, such as BOS."""
        # Of the library's ways only the batches let go of the GIL: other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """Advance the library's own decoding stream; None while a character is incomplete."""
        text: str | None = stream.step(self._tokenizer, token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's name.

        Nothing for ids that only pad the model's vocabulary.
        """
        if token_id >= self.vocab_size:
            return b""
        if token_id in self.special_ids:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        if self.bytes_table is not None:
            return self.bytes_table[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """A token for people to read; incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def with_chat_template(self, source: str) -> "Tokenizer":
        """The same tokenizer with another template."""
        facts = TokenizerFacts(self._facts.bos_token, self._facts.eos_token, source)
        return Tokenizer(self._tokenizer, facts)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _template(self, source: str | None) -> ChatTemplate | None:
        if source is None:
            return None
        names = {"bos_token": self._facts.bos_token, "eos_token": self._facts.eos_token}
        return ChatTemplate(source, {name: token or "" for name, token in names.items()})


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or GGUF file. Raises CheckpointError."""
    if model_path.is_file():
        tokenizer, source = read_gguf_tokenizer(model_path)
        facts = TokenizerFacts(source.bos_token, source.eos_token, source.chat_template)
        return Tokenizer(tokenizer, facts)
    path = model_path / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"cannot read {path}: {error}") from error
    # Some files keep what their training used; prompts are never cut or filled up in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(tokenizer, _facts_of(model_path))


def _facts_of(folder: Path) -> TokenizerFacts:
    config = _read_object(folder / "tokenizer_config.json")
    special = _read_object(folder / "special_tokens_map.json") | config
    template_file = folder / "chat_template.jinja"
    template = _default_template(config.get("chat_template"))
    if template_file.exists():
        try:
            template = template_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {template_file}: {error}") from error
    return TokenizerFacts(
        _token_name(special.get("bos_token")), _token_name(special.get("eos_token")), template
    )


def _read_object(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}


def _default_template(value: object) -> str | None:
    """A template, or the one called "default" of a list of named ones."""
    if isinstance(value, list):
        named = {item["name"]: item["template"] for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_name(value: object) -> str | None:
    """A token as config files have it: its name, or an object around it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
