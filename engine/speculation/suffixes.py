"""Where the last tokens of a text stood before, and how it went on there. No torch.

For each n-gram of 2 to 8 tokens a table remembers where it ended last. The tables have a fixed
number of slots, and a newer n-gram takes the slot of an older one whose key is alike: so a place
may be forgotten, and what a table says is compared with the text before it is believed.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SHORTEST, LONGEST = 2, 8  # tokens of the n-grams in the tables
MAX_MATCH = 32  # tokens; longer matches are not told apart
KEY_BITS = 32
KEY_MASK = 2**KEY_BITS - 1
MULTIPLIER = 0x9E3779B1  # 2**32 over the golden ratio: every bit of a token reaches the upper ones
LEAST_SLOTS = 256
FEW = 24  # tokens up to which one by one is faster than all at once
END = -1  # no token: stands behind each reply


@dataclass(frozen=True)
class Match:
    """A place where the last tokens stood before."""

    num_tokens: int  # that are the same, up to MAX_MATCH
    continuation: tuple[int, ...]  # what followed there; at least one token
    is_own: bool  # in the request's own text


class SuffixTable:
    """Where each n-gram ended last. 28 bytes a slot, and those never used take no memory."""

    def __init__(self, num_slots: int) -> None:
        """num_slots: of each length; a power of two."""
        assert num_slots == power_of_two(num_slots)
        self.num_slots = num_slots
        self._shift = KEY_BITS - (num_slots.bit_length() - 1)
        self._ends = np.zeros((LONGEST - SHORTEST + 1, num_slots), dtype=np.int32)  # end + 1, or 0
        self._flat = self._ends.reshape(-1).data  # faster, one by one

    def ends(self, keys: Many[int]) -> list[int]:
        """Where the n-grams with these keys, shortest first, ended last.

        As many as there may be: where no shorter n-gram ends, no longer one does.
        """
        flat, shift, first = self._flat, self._shift, 0
        found = []
        for key in keys:
            end = flat[first + (key >> shift)]
            if end == 0:
                break
            found.append(end - 1)
            first += self.num_slots
        return found

    def put(self, keys: Many[int], end: int) -> None:
        """The n-grams with these keys, shortest first, end at `end`."""
        flat, shift, first = self._flat, self._shift, 0
        for key in keys:
            flat[first + (key >> shift)] = end + 1
            first += self.num_slots

    def put_all(self, tokens: Ints, ends: Ints) -> None:
        """Every n-gram of `tokens`, of which token i stands at `ends[i]`."""
        keys = np.zeros(len(tokens) + 1, dtype=np.uint64)
        codes = (tokens + 1).astype(np.uint64)
        for length in range(1, min(LONGEST, len(tokens)) + 1):
            oldest = codes[: len(codes) - length + 1]
            keys = (keys[1:] + oldest) * np.uint64(MULTIPLIER) & np.uint64(KEY_MASK)
            if length >= SHORTEST:
                slots = (keys >> np.uint64(self._shift)).astype(np.int64)
                # Of equal slots the last assignment stays: that of the newest.
                self._ends[length - SHORTEST, slots] = ends[length - 1 :] + 1


def keys_of(tail: Many[int]) -> list[int]:
    """Keys of the n-grams that end with the last token of `tail`, shortest first."""
    key, keys = 0, []
    for token in reversed(tail[-LONGEST:]):
        key = (key + token + 1) * MULTIPLIER & KEY_MASK
        keys.append(key)
    return keys[SHORTEST - 1 :]


class TextIndex:
    """One request's text, prompt and output. It only grows, and every token is taken in once.

    28 to 56 bytes a token.
    """

    def __init__(self) -> None:
        self._table = SuffixTable(LEAST_SLOTS)
        self._num_taken = 0  # tokens; n-grams that end among them are in the table
        self._newest_keys: Many[int] = ()  # of the token behind those, if it has been looked at

    def find(self, tokens: list[int], keys: Many[int], count: int) -> Match | None:
        """How the text went on, up to `count` tokens, after the longest and then newest match.

        keys: of the text's end. What repeats itself is taken to go on so: a continuation that
        reaches the text's end begins again.
        """
        newest = len(tokens) - 1
        self._take_in(tokens, newest)
        self._newest_keys = keys
        ends = self._table.ends(keys)
        for length in range(len(ends) + 1, SHORTEST - 1, -1):
            end = ends[length - SHORTEST]
            if not length - 1 <= end < newest:
                continue
            if tokens[end - length + 1 : end + 1] == tokens[-length:]:
                while length < min(MAX_MATCH, end + 1) and tokens[end - length] == tokens[~length]:
                    length += 1
                known = tokens[end + 1 : end + 1 + count]
                repeated = known * -(-count // len(known))
                return Match(length, tuple(repeated[:count]), is_own=True)
        return None

    def _take_in(self, tokens: list[int], count: int) -> None:
        """The n-grams that end among the first `count` tokens."""
        if count > self._table.num_slots:
            self._table, self._num_taken = SuffixTable(power_of_two(2 * count)), 0
        if count - self._num_taken > FEW:
            first = max(0, self._num_taken - LONGEST + 1)
            self._table.put_all(np.array(tokens[first:count]), np.arange(first, count))
        else:
            for end in range(self._num_taken, count):
                keys = self._newest_keys or keys_of(tokens[max(0, end + 1 - LONGEST) : end + 1])
                self._table.put(keys, end)
                self._newest_keys = ()
        self._num_taken = max(count, self._num_taken)


class ReplyStore:
    """The newest replies of all requests, as many as have `capacity` tokens together.

    A ring: new replies are written over the oldest. A text that is still wanted is in a newer reply
    too. 32 to 60 bytes a token of capacity, whatever is put in.
    """

    def __init__(self, capacity: int) -> None:
        self._tokens = np.full(capacity, END, dtype=np.int32)
        self._ring = self._tokens.data
        self._table = SuffixTable(power_of_two(capacity))
        self._next = 0  # where the next reply goes

    def add(self, reply: Many[int]) -> None:
        """Of a reply longer than the store only the end is kept."""
        kept = np.array(reply[max(0, len(reply) + 1 - len(self._tokens)) :], dtype=np.int64)
        if len(kept) <= SHORTEST:
            return
        if self._next + len(kept) + 1 > len(self._tokens):
            self._next = 0  # what lies behind stays until the ring gets there
        first, end = self._next, self._next + len(kept)
        self._tokens[first:end] = kept
        self._tokens[end] = END
        self._table.put_all(kept, np.arange(first, end))
        self._next = end + 1

    def find(self, tokens: list[int], keys: Many[int], count: int) -> Match | None:
        """How a reply went on, up to `count` tokens, after the longest and then newest match."""
        ring, ends = self._ring, self._table.ends(keys)
        for length in range(len(ends) + 1, SHORTEST - 1, -1):
            end = ends[length - SHORTEST]
            if end < length - 1 or ring[end] != tokens[-1]:
                continue
            if ring[end - length + 1 : end + 1].tolist() == tokens[-length:]:
                followed = ring[end + 1 : end + 1 + count].tolist()
                if END in followed:
                    followed = followed[: followed.index(END)]
                if not followed:
                    continue
                most = min(MAX_MATCH, end + 1, len(tokens))
                while length < most and ring[end - length] == tokens[~length]:
                    length += 1
                return Match(length, tuple(followed), is_own=False)
        return None


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return int(1 << max(0, least - 1).bit_length())
