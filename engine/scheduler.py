"""Which tokens of which sequences the next step computes. No tensors.

Decoding sequences come first (one token each), then prefill chunks of running sequences and of
new ones, by rank: priority, then arrival. When pages run out, the sequence of the worst rank is
preempted: it gives its pages back and is computed again later, mostly from the prefix cache where
it is on. A waiting sequence never pushes out a running one, whatever its rank: it gets the next
free place.

Drafts take what is left: pages that nobody needs now, given back before anybody is preempted, and
tokens of the step's limit, of which prefill leaves a part for the drafts that are expected.
"""

import enum
import heapq
import time
from collections import deque
from collections.abc import Sequence as Many

from adaflash.engine.pages import NO_PARENT, PagePool, page_hash
from adaflash.engine.types import (
    Request,
    Row,
    RowKind,
    Sequence,
    SequenceStatus,
    StepPlan,
)

MIN_SHARE = 32  # tokens; a prompt that gets a chunk at all gets this many, if there are


class Scheduler:
    """Owns the sequences and their pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        prefix_cache: bool,
        draft_slots: int = 0,
    ) -> None:
        """draft_slots: how many slots to have ready behind each decoding sequence, for drafts."""
        assert max_batched_tokens >= max_num_seqs, "every decoding sequence needs a token"
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._prefix_cache = prefix_cache
        self._draft_slots = draft_slots
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap by rank
        self._num_arrivals = 0
        self.num_prefix_queries = 0  # prompt tokens looked up, since the start
        self.num_prefix_hits = 0  # of them, found

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        assert request.request_id not in self._sequences, f"{request.request_id} added twice"
        sequence = Sequence(request, order=self._num_arrivals)
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._enqueue(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request that has not finished."""
        return self._sequences.get(request_id)

    def finish(self, sequence: Sequence) -> None:
        """Take the sequence out, whatever it was doing, and free its pages."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove((sequence.rank, sequence))
            heapq.heapify(self._waiting)
        self._leave(sequence, SequenceStatus.FINISHED)
        del self._sequences[sequence.request.request_id]

    def schedule(self, *, expected_drafts: int = 0) -> StepPlan:
        """Decide the next step. Empty only if nothing waits or runs.

        expected_drafts: tokens of the step that prefill should leave, up to half of what it has.
        """
        self._running.sort(key=lambda sequence: sequence.rank)
        preempted: list[Sequence] = []
        decoding = self._decoding(preempted)
        left = self._max_batched_tokens - len(decoding)
        kept = min(expected_drafts, left // 2) if decoding else 0
        # Never take in more in a step that had to push someone out.
        prefills = self._prefills(left - kept, may_admit=not preempted)
        rows = [self._verify_row(sequence) for sequence in decoding] + prefills
        room = left - sum(row.num_tokens for row in prefills)
        return StepPlan(tuple(rows), tuple(preempted), room)

    def commit(self, row: Row, emitted: Many[int]) -> None:
        """The step computed `row` and emitted these tokens: lengths move here and nowhere else.

        All emitted tokens but the last were drafts that the target agreed with, so their K/V is
        in the pages already.
        """
        sequence = row.sequence
        assert sequence.status is SequenceStatus.RUNNING
        first_full = sequence.num_committed // self._pool.page_size
        sequence.token_ids.extend(emitted)
        sequence.num_committed += row.num_tokens + max(0, len(emitted) - 1)
        assert sequence.num_committed <= len(sequence.token_ids)
        num_full = sequence.num_committed // self._pool.page_size
        if self._prefix_cache:
            self._name_pages(sequence, num_full)
            for index in range(first_full, num_full):
                self._pool.publish(sequence.pages[index], sequence.page_hashes[index])

    def check_integrity(self) -> None:
        """Assert the scheduler's and the pool's invariants; cheap enough for tests only."""
        self._pool.check_integrity(sequence.pages for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            running = sequence.status is SequenceStatus.RUNNING
            assert running == (sequence in self._running)
            assert running or (not sequence.pages and sequence.num_committed == 0)
            assert sequence.num_committed < len(sequence.token_ids)
            assert sequence.num_committed <= len(sequence.pages) * self._pool.page_size
        assert len(self._running) <= self._max_num_seqs

    def _decoding(self, preempted: list[Sequence]) -> list[Sequence]:
        """Running sequences of which only the newest token is not computed, with room for it."""
        decoding = []
        for sequence in [s for s in self._running if s.num_uncommitted == 1]:
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, preempted):
                decoding.append(sequence)
        return decoding

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Give the sequence pages for all its tokens, preempting worse ranks if need be.

        False if it was itself the worst and had to go.
        """
        missing = self._pool.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        if missing > self._pool.num_available:
            self._reclaim_draft_pages()
        while missing > self._pool.num_available:
            victim = max(self._running, key=lambda candidate: candidate.rank)
            self._leave(victim, SequenceStatus.WAITING)
            self._enqueue(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(self._pool.allocate(max(0, missing)))
        return True

    def _verify_row(self, sequence: Sequence) -> Row:
        """The row of a decoding sequence, with as many slots for drafts as can be had."""
        length, size = len(sequence.token_ids), self._pool.page_size
        missing = self._pool.pages_for(length + self._draft_slots) - len(sequence.pages)
        sequence.pages.extend(self._pool.allocate(max(0, min(missing, self._pool.num_available))))
        free = len(sequence.pages) * size - length
        draft_slots = min(free, self._draft_slots)
        return Row(sequence, sequence.num_committed, 1, RowKind.VERIFY, draft_slots)

    def _has_draft_page(self, sequence: Sequence) -> bool:
        """Whether it holds a page behind its tokens."""
        return len(sequence.pages) > self._pool.pages_for(len(sequence.token_ids))

    def _reclaim_draft_pages(self) -> None:
        for sequence in filter(self._has_draft_page, self._running):
            kept = self._pool.pages_for(len(sequence.token_ids))
            self._pool.release(sequence.pages[kept:])
            del sequence.pages[kept:]

    def _prefills(self, budget: int, *, may_admit: bool) -> list[Row]:
        """Chunks of prompts by rank, of running sequences and of waiting ones that can start.

        Within a priority each takes half of what is left, so that a long prompt does not hold up
        the short ones behind it; a worse priority gets only what the better ones leave.
        """
        running = deque(s for s in self._running if s.num_uncommitted > 1)
        chunks: dict[Sequence, int] = {}  # tokens, in order of rank
        priority: int | None = None  # of the newest chunk
        deferred: list[Sequence] = []
        while budget > 0:
            waiting = self._first_waiting() if may_admit else None
            if running and (waiting is None or running[0].rank < waiting.rank):
                sequence = running[0]
            elif waiting is not None:
                sequence = waiting
            else:
                break
            if sequence.request.priority != priority:
                priority = sequence.request.priority
                budget = _lengthen(chunks, budget)
                continue
            if sequence is waiting:
                self._pop_waiting()
                verdict = self._try_to_start(sequence)
                if verdict is not _Admission.STARTED:
                    deferred.append(sequence)
                    # Later ones must not take the pages that this one lacks; of those that share,
                    # no more need be looked at than could run.
                    may_admit = (
                        verdict is _Admission.SHARES_SOON and len(deferred) < self._max_num_seqs
                    )
                    continue
            else:
                running.popleft()
            chunks[sequence] = min(budget, max(budget // 2, MIN_SHARE), sequence.num_uncommitted)
            budget -= chunks[sequence]
        for sequence in deferred:
            self._enqueue(sequence)
        _lengthen(chunks, budget)
        return [Row(s, s.num_committed, count, RowKind.PREFILL) for s, count in chunks.items()]

    def _first_waiting(self) -> Sequence | None:
        """The waiting sequence of the best rank, if a seat is free for it."""
        has_seat = len(self._running) < self._max_num_seqs
        return self._waiting[0][1] if has_seat and self._waiting else None

    def _try_to_start(self, sequence: Sequence) -> "_Admission":
        """Give a waiting sequence its pages, shared ones first, if it can run now."""
        self._name_pages(sequence, len(sequence.token_ids) // self._pool.page_size)
        # At least the newest token is computed, for its logits.
        names = sequence.page_hashes[: (len(sequence.token_ids) - 1) // self._pool.page_size]
        pages = self._pool.match(names)
        if len(pages) < len(names) and self._is_being_computed(names[len(pages)], sequence):
            self._pool.release(pages)
            return _Admission.SHARES_SOON
        if not self._fits(sequence, pages):
            self._reclaim_draft_pages()
        if not self._fits(sequence, pages):
            self._pool.release(pages)
            return _Admission.LACKS_PAGES
        self._start(sequence, pages)
        return _Admission.STARTED

    def _is_being_computed(self, name: bytes, candidate: Sequence) -> bool:
        """Whether a running sequence of better rank computes the page called `name`.

        Then the candidate waits and shares it (n choices of one prompt, a burst with one system
        prompt). It never waits for worse ranks.
        """
        size = self._pool.page_size
        return any(
            name in other.page_hashes[other.num_committed // size :]
            for other in self._running
            if other.num_uncommitted > 1 and other.rank < candidate.rank
        )

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether the pool has the rest of the pages, and one more for each running sequence."""
        missing = self._pool.pages_for(len(sequence.token_ids)) - len(cached)
        reserve = sum(not self._has_draft_page(other) for other in self._running)
        return missing + reserve <= self._pool.num_available

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        missing = self._pool.pages_for(len(sequence.token_ids)) - len(cached)
        sequence.pages = cached + self._pool.allocate(missing)
        sequence.num_committed = len(cached) * self._pool.page_size
        sequence.move_to(SequenceStatus.RUNNING)
        self._running.append(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = time.monotonic()
            sequence.num_cached_tokens = sequence.num_committed
            if self._prefix_cache:
                self.num_prefix_queries += sequence.num_prompt_tokens
                self.num_prefix_hits += sequence.num_committed

    def _leave(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Out of the running, pages back."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._pool.release(sequence.pages)
            sequence.pages = []
            sequence.num_committed = 0
        sequence.move_to(status)

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        """Extend the sequence's hash chain to its first `count` pages."""
        if not self._prefix_cache:
            return
        names, size = sequence.page_hashes, self._pool.page_size
        for index in range(len(names), count):
            parent = names[-1] if names else NO_PARENT
            names.append(page_hash(parent, sequence.token_ids[index * size : (index + 1) * size]))

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _pop_waiting(self) -> Sequence:
        return heapq.heappop(self._waiting)[1]


class _Admission(enum.Enum):
    STARTED = "started"
    SHARES_SOON = "shares soon"  # a neighbour is computing its next page
    LACKS_PAGES = "lacks pages"


def _lengthen(chunks: dict[Sequence, int], spare: int) -> int:
    """Give spare tokens to the first chunks that can use them; returns what is left."""
    for sequence, count in chunks.items():
        more = min(spare, sequence.num_uncommitted - count)
        chunks[sequence] = count + more
        spare -= more
    return spare
