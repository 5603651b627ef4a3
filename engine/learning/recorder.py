"""Keeps the texts of finished requests on disk, and where their drafts were rejected. No torch.

The engine's side only counts and appends; a thread redacts, writes and deletes. What is not taken
in time, or not by the disk, is left out and counted: serving never waits and never fails for it.
"""

import contextlib
import hashlib
import random
import threading
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass

from adaflash.engine.learning.buffer import Buffer
from adaflash.engine.learning.redaction import Redact
from adaflash.engine.messages import NotLearnt
from adaflash.engine.trajectories import Trajectory
from adaflash.engine.types import Request, Sequence

DOMAIN = "served"
BOUND_EVERY_S = 60.0  # texts grow too old also while none come
CLOSE_TIMEOUT_S = 2.5  # less than the server waits for the engine's end


@dataclass(frozen=True)
class RecorderLimits:
    """When a shard is written, and what may wait for it."""

    texts_per_shard: int = 64
    max_wait_s: float = 15.0  # of the first text of a shard
    max_waiting_tokens: int = 2**20


@dataclass(frozen=True)
class _Text:
    """A finished request, as the engine knew it."""

    request: Request
    token_ids: list[int]
    rejected: tuple[int, ...]

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)


@dataclass
class RecorderNews:
    """Counts since the last look."""

    num_kept: int
    num_left_out: dict[NotLearnt, int]
    buffer_bytes: int
    problems: list[str]


class Recorder:
    """Told by the engine of what requests do; see the module."""

    def __init__(
        self,
        buffer: Buffer,
        *,
        rate: float,
        redact: Redact | None = None,
        limits: RecorderLimits = RecorderLimits(),
    ) -> None:
        """rate: share of the requests that is kept."""
        self._buffer = buffer
        self._rate = rate
        self._redact = redact
        self._limits = limits
        self._rejected: dict[str, list[int]] = {}  # positions, by running request to be kept
        # Everything below is shared with the thread, under this condition's lock.
        self._changed = threading.Condition()
        self._waiting: list[_Text] = []
        self._num_waiting_tokens = 0
        self._first_s = 0.0  # when the first of the waiting texts came
        self._closing = False
        self._num_kept = 0
        self._left_out: Counter[NotLearnt] = Counter()
        self._problems: list[str] = []
        self._failing: set[NotLearnt] = set()  # what did not work the last time
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, request: Request) -> None:
        """A request was taken in."""
        if request.may_learn and random.random() < self._rate:
            self._rejected[request.request_id] = []

    def rejected(self, request_id: str, position: int) -> None:
        """The draft at this absolute position was the first of its block to be wrong."""
        positions = self._rejected.get(request_id)
        if positions is not None:
            positions.append(position)

    def finish(self, sequence: Sequence) -> None:
        """A request came to its own end."""
        request = sequence.request
        rejected = self._rejected.pop(request.request_id, None)
        if rejected is not None:
            # The last rejection may lie behind the token that ended the request.
            inside = tuple(place for place in rejected if place < len(sequence.token_ids))
            self._hand_over(_Text(request, sequence.token_ids, inside))
            return
        with self._changed:
            reason = NotLearnt.NOT_SAMPLED if request.may_learn else NotLearnt.OPT_OUT
            self._left_out[reason] += 1

    def forget(self, request_id: str) -> None:
        """A request was aborted: its text is nobody's answer."""
        self._rejected.pop(request_id, None)

    def news(self) -> RecorderNews:
        with self._changed:
            found = RecorderNews(
                self._num_kept, dict(self._left_out), self._buffer.num_bytes, self._problems
            )
            self._num_kept, self._problems = 0, []
            self._left_out.clear()
        return found

    def close(self) -> None:
        """Write what waits."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._buffer.close()

    def _hand_over(self, text: _Text) -> None:
        with self._changed:
            if self._num_waiting_tokens + len(text.token_ids) > self._limits.max_waiting_tokens:
                self._left_out[NotLearnt.QUEUE_FULL] += 1
                return
            if not self._waiting:
                self._first_s = time.monotonic()
            self._waiting.append(text)
            self._num_waiting_tokens += len(text.token_ids)
            if len(self._waiting) in (1, self._limits.texts_per_shard):
                self._changed.notify()

    def _work(self) -> None:
        """The thread."""
        while not self._closing:
            texts = self._take()
            if texts:
                self._write(texts)
            else:
                with contextlib.suppress(OSError):
                    self._buffer.num_bytes = self._buffer.bound()
        self._write(self._take())

    def _take(self) -> list[_Text]:
        """Wait until a shard is due, or for long enough to look at the limits again."""
        idle_until_s = time.monotonic() + BOUND_EVERY_S
        with self._changed:
            while not self._closing and len(self._waiting) < self._limits.texts_per_shard:
                due_s = self._first_s + self._limits.max_wait_s if self._waiting else idle_until_s
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            texts, self._waiting = self._waiting, []
            self._num_waiting_tokens = 0
        return texts

    def _write(self, texts: Many[_Text]) -> None:
        kept = [item for item in map(self._trajectory, texts) if item is not None]
        if not kept:
            return
        try:
            self._buffer.write(kept)
        except Exception as error:  # noqa: BLE001 - a full disk must not end the engine
            problem = f"cannot keep texts in {self._buffer.folder}: {error}"
            self._failed(NotLearnt.NOT_WRITTEN, len(kept), problem)
            return
        with self._changed:
            self._num_kept += len(kept)
            self._failing.discard(NotLearnt.NOT_WRITTEN)

    def _failed(self, reason: NotLearnt, num_texts: int, problem: str) -> None:
        with self._changed:
            self._left_out[reason] += num_texts
            if reason not in self._failing:  # said once, and again only after it has worked
                self._problems.append(problem)
            self._failing.add(reason)

    def _trajectory(self, text: _Text) -> Trajectory | None:
        """What is to be written of a text, if anything."""
        token_ids = text.token_ids if self._redact is None else self._redacted(self._redact, text)
        if token_ids is None:
            return None
        name = f"{digest_of(token_ids[: text.prompt_len])}#{uuid.uuid4().hex[:12]}"
        sampling = text.request.sampling
        return Trajectory(
            name,
            DOMAIN,
            tuple(token_ids),
            text.prompt_len,
            text.rejected,
            temperature=sampling.temperature,
            seed=sampling.seed,
        )

    def _redacted(self, redact: Redact, text: _Text) -> list[int] | None:
        try:
            token_ids = _call(redact, text)
        except Exception as error:  # noqa: BLE001 - what the hook cannot judge is left out
            self._failed(NotLearnt.HOOK_FAILED, 1, f"the redaction hook failed: {error!r}")
            return None
        with self._changed:
            self._failing.discard(NotLearnt.HOOK_FAILED)
            if token_ids is None:
                self._left_out[NotLearnt.REDACTED] += 1
        return token_ids


def digest_of(prompt_ids: Many[int]) -> str:
    """Names a prompt, so that its answers can be told to belong together."""
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()


def _call(redact: Redact, text: _Text) -> list[int] | None:
    """Raises ValueError for a text that is not as long: its positions would mean nothing."""
    found = redact(list(text.token_ids), text.prompt_len)
    if found is None:
        return None
    if len(found) != len(text.token_ids) or not all(type(t) is int and t >= 0 for t in found):
        raise ValueError(f"it must return None or {len(text.token_ids)} token ids")
    return found
