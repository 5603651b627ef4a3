"""The tokenizer inside a GGUF file, rebuilt for the tokenizers library."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from adaflash.engine.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types
SPACE = "\u2581"  # how SentencePiece writes a space

# How text is split before the merges, by llama.cpp's name for the pre-tokenizer.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "mistral-bpe": LLAMA3,
}
SINGLE_DIGITS = frozenset({"smollm"})


@dataclass(frozen=True)
class GgufTokenizer:
    """The `tokenizer.ggml.*` part of the metadata."""

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None

    def name(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def read_gguf_tokenizer(
    path: Path,
) -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """The tokenizer, the names of its BOS and EOS tokens, and the chat template.

    Raises CheckpointError for a kind that is not understood.
    """
    source = _read(path)
    if source.kind == "gpt2":
        tokenizer = _byte_level(source)
    elif source.kind == "llama":
        tokenizer = _sentencepiece(source)
    else:
        raise CheckpointError(
            f"the GGUF tokenizer model {source.kind!r} is not supported; 'gpt2' and 'llama' are"
        )
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(source.tokens, source.types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if source.add_bos and source.bos_id is not None:
        bos = source.tokens[source.bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, source.bos_id)]
        )
    return tokenizer, source.name(source.bos_id), source.name(source.eos_id), source.chat_template


def _byte_level(source: GgufTokenizer) -> tokenizers.Tokenizer:
    """GPT-2's kind: a split by regular expression, bytes as characters, ranked merges."""
    if source.pre not in SPLITS:
        raise CheckpointError(
            f"the GGUF pre-tokenizer {source.pre!r} is not supported; these are: "
            f"{', '.join(SPLITS)}"
        )
    vocabulary = {token: id_ for id_, token in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in source.merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[source.pre]), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [split, bytes_]
    if source.pre in SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: GgufTokenizer) -> tokenizers.Tokenizer:
    """SentencePiece BPE: merges follow from the scores, unknown characters fall back to bytes."""
    vocabulary = {token: id_ for id_, token in enumerate(source.tokens)}
    unknown = next(
        (t for t, k in zip(source.tokens, source.types, strict=True) if k == UNKNOWN), None
    )
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(source, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if source.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _merges_from_scores(source: GgufTokenizer, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best resulting score first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for id_, token in enumerate(source.tokens):
        if source.types[id_] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-source.scores[id_], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def _read(path: Path) -> GgufTokenizer:
    try:
        fields = gguf.GGUFReader(str(path)).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"cannot read {path} as GGUF: {error}") from error
    prefix = "tokenizer.ggml."

    def get(name: str, default: object) -> object:
        field = fields.get(name)
        return default if field is None else field.contents()

    def optional_id(name: str) -> int | None:
        value = get(prefix + name, None)
        return value if isinstance(value, int) else None

    tokens, types = (
        _strings(fields.get(prefix + "tokens")),
        _numbers(fields.get(prefix + "token_type")),
    )
    if not tokens:
        raise CheckpointError(f"{path} holds no tokenizer")
    kind = str(get(prefix + "model", ""))
    template = get("tokenizer.chat_template", None)
    return GgufTokenizer(
        kind=kind,
        pre=str(get(prefix + "pre", "default")),
        tokens=tokens,
        types=[int(value) for value in types] or [NORMAL] * len(tokens),
        merges=_strings(fields.get(prefix + "merges")),
        scores=_numbers(fields.get(prefix + "scores")),
        bos_id=optional_id("bos_token_id"),
        eos_id=optional_id("eos_token_id"),
        add_bos=bool(get(prefix + "add_bos_token", kind == "llama")),
        add_space_prefix=bool(get(prefix + "add_space_prefix", True)),
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(field: gguf.ReaderField | None) -> list[str]:
    return [] if field is None else [bytes(field.parts[i]).decode() for i in field.data]


def _numbers(field: gguf.ReaderField | None) -> list[float]:
    return [] if field is None else [field.parts[i][0] for i in field.data]
