"""Drafts that were written before: found in a request's own text, or in recent replies. No torch.

No pass is made for them, and nothing is looked at but tokens that are known. Like all drafts they
are only guesses, and the target's own choices decide: what another user was told becomes text here
only if the target chooses the same tokens anyway. It becomes text sooner then, which somebody who
measures closely could notice; without a store (--lookup-store-tokens 0) there is nothing to notice.
"""

from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from adaflash.engine.speculation.budget import Guesses
from adaflash.engine.speculation.calibration import Floats, Ints, logit, sigmoid
from adaflash.engine.speculation.suffixes import (
    LONGEST,
    MAX_MATCH,
    Match,
    ReplyStore,
    TextIndex,
    keys_of,
)
from adaflash.engine.types import Row, Sequence

CLASSES = (2, 3, 4, 5, 6, 8, 12, 16, 24, MAX_MATCH)  # least tokens matched of each class
# A match of n tokens goes on for one more with the chance n / (n + doubt), before anything is seen:
# so it was, within 3 points, for 3 to 8 tokens in 1,500 greedy texts of the default model; longer
# matches went on more often than that.
OWN_DOUBT, STORE_DOUBT = 2.0, 7.0
PRIOR_WEIGHT = 8.0  # outcomes that the prior counts for
WINDOW = 512.0  # outcomes of a class and position that count at most; older ones fade
REQUEST_RATE = 0.1  # logits that a request's chances move by, for an outcome at even odds
MAX_SHIFT = 3.0  # logits


@dataclass
class _Reader:
    """What is known of one request."""

    index: TextIndex = field(default_factory=TextIndex)
    shift: float = 0.0  # of its chances, in logits: some texts repeat themselves less than others


class Lookup:
    """A draft source that costs no pass."""

    def __init__(self, max_drafts: int, store_tokens: int) -> None:
        """store_tokens: of all recent replies together; 0: only a request's own text is read."""
        self._max_drafts = max_drafts
        self._store = ReplyStore(store_tokens) if store_tokens > 0 else None
        self._readers: WeakKeyDictionary[Sequence, _Reader] = WeakKeyDictionary()
        self._rates = SuccessRates(max_drafts)

    def guess(self, rows: Many[Row]) -> Guesses:
        """How each decoding row may go on, as far as its text, or another, has been there."""
        readers = [self._reader_of(row.sequence) for row in rows]
        matches = tuple(
            self._find(row.sequence.token_ids, reader)
            for row, reader in zip(rows, readers, strict=True)
        )
        shifts = np.array([reader.shift for reader in readers])
        return Guesses(tuple(rows), matches, self._rates.conditional(matches, shifts))

    def learn(self, guesses: Guesses, emitted: Many[Many[int]]) -> None:
        """What each row emitted shows how right its guess was, also where it was not verified."""
        pairs = list(zip(guesses.matches, emitted, strict=True))
        right = np.array([_num_right(match, tokens) for match, tokens in pairs], dtype=np.int64)
        shown = np.array([_num_shown(match, tokens) for match, tokens in pairs], dtype=np.int64)
        tried = np.minimum(right + 1, shown)
        self._rates.learn(guesses.matches, tried, right)
        surprise = _surprise(guesses.conditional, tried, right)
        for row, change in zip(guesses.rows, (REQUEST_RATE * surprise).tolist(), strict=True):
            reader = self._reader_of(row.sequence)
            reader.shift = min(max(reader.shift + change, -MAX_SHIFT), MAX_SHIFT)

    def remember(self, sequence: Sequence) -> None:
        """A request has ended: its reply may help others."""
        if self._store is not None:
            self._store.add(sequence.token_ids[sequence.num_prompt_tokens :])

    def _reader_of(self, sequence: Sequence) -> _Reader:
        """Gone with the sequence, however that ends."""
        reader = self._readers.get(sequence)
        if reader is None:
            reader = self._readers[sequence] = _Reader()
        return reader

    def _find(self, tokens: list[int], reader: _Reader) -> Match | None:
        """The longest match in each text; of the two, the one that has been right more often."""
        keys = keys_of(tokens[-LONGEST:])
        own = reader.index.find(tokens, keys, self._max_drafts)
        other = None if self._store is None else self._store.find(tokens, keys, self._max_drafts)
        if own is None or other is None:
            return own or other
        return other if self._rates.first(other) > self._rates.first(own) else own


class SuccessRates:
    """How often drafts were right, by the kind and length of the match and their position."""

    def __init__(self, num_positions: int) -> None:
        own, others = _prior(OWN_DOUBT, num_positions), _prior(STORE_DOUBT, num_positions)
        self._right: Floats = PRIOR_WEIGHT * np.concatenate((own, others))  # [classes, J]
        self._tried: Floats = np.full_like(self._right, PRIOR_WEIGHT)
        self._logits: Floats = logit(self._right / self._tried)

    def conditional(self, matches: Many[Match | None], shifts: Floats) -> Floats:
        """P(draft right | all before it are) [N, J], with a shift for each match in logits."""
        lengths = np.array([len(match.continuation) if match else 0 for match in matches], int)
        chances = sigmoid(self._logits[_classes_of(matches)] + shifts[:, None])
        return np.where(_positions(self._logits) < lengths[:, None], chances, 0.0)

    def first(self, match: Match) -> float:
        """By how much the first draft is likely to be right, in logits."""
        return float(self._logits[_class_of(match), 0])

    def learn(self, matches: Many[Match | None], tried: Ints, right: Ints) -> None:
        """Of each match so many drafts showed whether they are right, the first so many were."""
        classes, position = _classes_of(matches), _positions(self._logits)
        np.add.at(self._tried, classes, position < tried[:, None])
        np.add.at(self._right, classes, position < right[:, None])
        fading = np.minimum(1.0, WINDOW / self._tried)
        self._tried *= fading
        self._right *= fading
        self._logits = logit(self._right / self._tried)


def _prior(doubt: float, num_positions: int) -> Floats:
    """Chances [classes, J] of matches that get longer with each draft that is right."""
    matched = np.array(CLASSES)[:, None] + np.arange(num_positions)
    found: Floats = matched / (matched + doubt)
    return found


def _class_of(match: Match) -> int:
    length_class = bisect_right(CLASSES, match.num_tokens) - 1
    return length_class if match.is_own else len(CLASSES) + length_class


def _classes_of(matches: Many[Match | None]) -> Ints:
    """Those of no match are never read."""
    return np.array([_class_of(match) if match else 0 for match in matches], dtype=np.int64)


def _positions(table: Floats) -> Ints:
    return np.arange(table.shape[1])


def _num_shown(match: Match | None, emitted: Many[int]) -> int:
    """Drafts that can be compared with what was emitted."""
    return min(len(match.continuation), len(emitted)) if match else 0


def _num_right(match: Match | None, emitted: Many[int]) -> int:
    """Leading drafts that were emitted."""
    num_shown, right = _num_shown(match, emitted), 0
    while match and right < num_shown and match.continuation[right] == emitted[right]:
        right += 1
    return right


def _surprise(conditional: Floats, tried: Ints, right: Ints) -> Floats:
    """By how much more of each row's drafts were right than was expected [N]."""
    position = _positions(conditional)
    expected = np.where(position < tried[:, None], conditional, 0.0).sum(axis=1)
    found: Floats = right - expected
    return found
