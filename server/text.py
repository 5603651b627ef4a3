"""From streams of token ids to streams of text: whole characters, and no part of a stop string.

Streaming and whole answers take the same way, so they cannot differ.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers.decoders import DecodeStream

from adaflash.server.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Turns one token after the other into text that will not change any more."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: an incremental UTF-8 decoder over a table."""

    def __init__(self, table: Sequence[bytes], special_ids: frozenset[int]) -> None:
        self._table = table
        self._special_ids = special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or token_id >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class LibraryDetokenizer:
    """For all other tokenizers: the tokenizers library's own stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # since the last text that came out

    def push(self, token_id: int) -> str:
        text = self._tokenizer.step(self._stream, token_id)
        if text is None:
            self._held.append(token_id)
            return ""
        self._held = []
        return text

    def flush(self) -> str:
        return self._tokenizer.decode(self._held) if self._held else ""


@dataclass(frozen=True)
class TextPiece:
    """What a push brought."""

    text: str
    num_tokens: int  # pushed tokens that belong to the output: all, or up to the stop string's end
    stop: str | None = None  # the stop string that ended the text


class TextStream:
    """One choice's text. Ends at the first token that completes a stop string.

    The text is cut where that string starts. Matches among the first `min_tokens` tokens do not
    count, as if their text had come before.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, min_tokens: int = 0) -> None:
        table = tokenizer.bytes_table
        self._detokenizer: Detokenizer = (
            LibraryDetokenizer(tokenizer)
            if table is None
            else ByteDetokenizer(table, tokenizer.special_ids)
        )
        self._stop = tuple(stop)
        self._num_unchecked = min_tokens
        self._held = ""  # decoded, but the end may become a stop string
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Text that is certain with these tokens; after a stop, nothing."""
        if self._stopped:
            return TextPiece("", 0)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._held += self._detokenizer.push(token_id)
            if self._num_unchecked > 0:
                self._num_unchecked -= 1
                text += self._release(len(self._held))
                continue
            match = self._first_match()
            if match is not None:
                text += self._end_at(match)
                return TextPiece(text, count, match)
            text += self._release(len(self._held) - self._num_undecided())
        return TextPiece(text, len(token_ids))

    def finish(self) -> TextPiece:
        """At the end of the tokens: what was held back, unless it makes a stop string after all."""
        if self._stopped:
            return TextPiece("", 0)
        self._held += self._detokenizer.flush()
        match = self._first_match()
        if match is not None:
            return TextPiece(self._end_at(match), 0, match)
        return TextPiece(self._release(len(self._held)), 0)

    def _first_match(self) -> str | None:
        """The stop string that starts first in what is held; of several the longest."""
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stop]
        found = [match for match in found if match[0] >= 0]
        return min(found)[2] if found else None

    def _end_at(self, match: str) -> str:
        self._stopped = True
        text = self._held[: self._held.find(match)]
        self._held = ""
        return text

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        longest = min(len(self._held), max(map(len, self._stop), default=0))
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
