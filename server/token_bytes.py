"""The exact bytes of every token, for tokenizers that decode token by token."""

import json
import re
from collections.abc import Callable

import tokenizers

TokenBytes = list[bytes]  # by token id; ids without a token stand for nothing

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """A table, or None if the tokenizer's decoder is of a kind that looks at neighbours.

    Byte-level decoders map characters to bytes; byte-fallback ones (SentencePiece) write a space
    as U+2581 and unknown bytes as <0xNN>. The latter strip the first space of a whole text; what a
    model generates is no whole text, so the table keeps it.
    """
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())  # its part of tokenizer.json
    if decoder.get("type") == "ByteLevel":
        to_bytes = _byte_level()
    elif "ByteFallback" in {part.get("type") for part in decoder.get("decoders", ())}:
        to_bytes = _byte_fallback
    else:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        table[id_] = to_bytes(token)
    return table


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table).

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_level() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()  # the decoder takes such a token as text

    return to_bytes


def _byte_fallback(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
