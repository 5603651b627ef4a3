"""The tokenizer inside a GGUF file, rebuilt for the tokenizers library."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from adaflash.engine.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types
SPACE = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True)
class PreTokenizer:
    """What happens to a text before the merges of byte-level BPE, and what goes with it."""

    pattern: str  # splits the text
    single_digits: bool = False  # digits are split off before that
    composes: bool = False  # the text is brought to Unicode's NFC first of all
    takes_whole_words: bool = False  # a piece that is a token needs no merges
    adds_bos: bool = False  # unless the file says otherwise


GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

GPT2 = PreTokenizer(GPT2_PATTERN)
SMOLLM = PreTokenizer(GPT2_PATTERN, single_digits=True)
LLAMA3 = PreTokenizer(LLAMA3_PATTERN, takes_whole_words=True, adds_bos=True)
QWEN2 = PreTokenizer(QWEN2_PATTERN, composes=True)

# By llama.cpp's names: of the first model that had one, and of later ones that share it.
PRE_TOKENIZERS = (
    dict.fromkeys(("default", "gpt-2"), GPT2)
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), SMOLLM)
    | dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2)
)


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The `tokenizer.ggml.*` part of a file's metadata, under its names."""

    model: str
    pre: str = "default"
    tokens: list[str]
    token_type: list[int]
    merges: list[str] = []  # of two tokens with a space between
    scores: list[float] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos_token: bool | None = None  # None: as is usual for the kind
    add_eos_token: bool = False
    add_space_prefix: bool = True
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for id_ in (self.bos_token_id, self.eos_token_id):
            if id_ is not None and id_ >= len(self.tokens):
                raise ValueError(f"token {id_} is none of its {len(self.tokens)}")

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self.tokens[self.bos_token_id]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self.tokens[self.eos_token_id]

    @property
    def ids(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def of_type(self, *types: int) -> list[str]:
        pairs = zip(self.tokens, self.token_type, strict=True)
        return [token for token, kind in pairs if kind in types]


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, GgufVocabulary]:
    """The tokenizer, and what it was built from.

    Raises CheckpointError for a kind that is not understood and for parts that do not fit.
    """
    metadata = _read_metadata(path)
    prefix = "tokenizer.ggml."
    fields = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    template = {"chat_template": metadata.get("tokenizer.chat_template")}
    try:
        vocabulary = msgspec.convert(fields | template, GgufVocabulary)
        return _build(vocabulary), vocabulary
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(f"cannot use the tokenizer in {path}: {error}") from error


def _read_metadata(path: Path) -> dict[str, object]:
    """All key/value pairs at the head of the file. Raises CheckpointError."""
    try:
        fields = gguf.GGUFReader(str(path)).fields
        return {name: field.contents() for name, field in fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"cannot read {path} as GGUF: {error}") from error


def _build(source: GgufVocabulary) -> tokenizers.Tokenizer:
    if source.model == "gpt2":
        pre = _pre_tokenizer(source.pre)
        tokenizer, adds_bos = _byte_level(source, pre), pre.adds_bos
    elif source.model == "llama":
        tokenizer, adds_bos = _sentencepiece(source), True
    else:
        raise CheckpointError(
            f"the GGUF tokenizer model {source.model!r} is not supported; 'gpt2' and 'llama' are"
        )
    for special, types in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        found = source.of_type(*types)
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in found])
    if source.add_bos_token is not None:
        adds_bos = source.add_bos_token
    bos = source.bos_token if adds_bos else None
    _frame(tokenizer, bos, source.eos_token if source.add_eos_token else None)
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the GGUF pre-tokenizer {name!r} is not supported; these are: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(source: GgufVocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """GPT-2's kind: a split by regular expression, bytes as characters, ranked merges."""
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in source.merges)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=source.ids, merges=merges, ignore_merges=pre.takes_whole_words)
    )
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    split = pre_tokenizers.Split(tokenizers.Regex(pre.pattern), behavior="isolated")
    to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, split, to_characters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: GgufVocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE: merges follow from the scores, unknown characters fall back to bytes."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=source.ids,
            merges=_merges_from_scores(source),
            unk_token=next(iter(source.of_type(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if source.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if source.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(source: GgufVocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best resulting score first."""
    ids = source.ids
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, kind, score in zip(source.tokens, source.token_type, source.scores, strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _frame(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put the model's own tokens around every text that asks for them."""
    before, after = [bos] if bos else [], [eos] if eos else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in before + after],
        )
