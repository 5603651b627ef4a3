"""The scheduler alone: a simulated engine writes into pages what a real one would."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adaflash.engine.pages import PagePool
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.types import Request, Row, RowKind, SamplingParams

PAGE_SIZE = 4
NUM_PAGES = 12
MAX_TOKENS = NUM_PAGES * PAGE_SIZE


def request(name: str, prompt: list[int], *, max_tokens: int = 8, priority: int = 0) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    return Request(request_id=name, prompt_ids=prompt, sampling=sampling, priority=priority)


def scheduler(
    *,
    num_pages: int = NUM_PAGES,
    seqs: int = 4,
    tokens: int = 8,
    prefix_cache: bool = True,
    draft_slots: int = 0,
) -> Scheduler:
    return Scheduler(
        PagePool(num_pages, PAGE_SIZE),
        max_num_seqs=seqs,
        max_batched_tokens=tokens,
        prefix_cache=prefix_cache,
        draft_slots=draft_slots,
    )


def step(under_test: Scheduler, token: int = 7) -> tuple[Row, ...]:
    """One step in which the target always chooses `token`."""
    rows = under_test.schedule().rows
    for row in rows:
        under_test.commit(row, [token] if row.reaches_end else [])
    under_test.check_integrity()
    return rows


def shapes(rows: tuple[Row, ...]) -> list[tuple[str, RowKind, int, int]]:
    return [(r.sequence.request.request_id, r.kind, r.start, r.num_tokens) for r in rows]


def test_prompts_are_chunked_and_decoding_goes_first() -> None:
    under_test = scheduler(tokens=8)
    under_test.add(request("a", list(range(5))))
    assert shapes(step(under_test)) == [("a", RowKind.PREFILL, 0, 5)]
    under_test.add(request("b", list(range(100, 110))))
    assert shapes(step(under_test)) == [
        ("a", RowKind.VERIFY, 5, 1),
        ("b", RowKind.PREFILL, 0, 7),
    ]
    assert shapes(step(under_test)) == [
        ("a", RowKind.VERIFY, 6, 1),
        ("b", RowKind.PREFILL, 7, 3),
    ]
    assert shapes(step(under_test)) == [("a", RowKind.VERIFY, 7, 1), ("b", RowKind.VERIFY, 10, 1)]


def test_a_lower_priority_number_goes_first_then_arrival() -> None:
    under_test = scheduler(seqs=1, tokens=8)
    for name, priority in [("late", 5), ("first", 1), ("second", 1)]:
        under_test.add(request(name, [1, 2], priority=priority))
    served = []
    while under_test.has_work:
        row = step(under_test)[0]
        served.append(row.sequence.request.request_id)
        under_test.finish(row.sequence)
    assert served == ["first", "second", "late"]


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    under_test = scheduler(num_pages=800, tokens=128)
    under_test.add(request("long", list(range(500))))
    assert shapes(step(under_test)) == [("long", RowKind.PREFILL, 0, 128)]  # alone: all of it
    under_test.add(request("short", [7] * 10))
    assert shapes(step(under_test)) == [
        ("long", RowKind.PREFILL, 128, 118),  # its half, and what the short one leaves
        ("short", RowKind.PREFILL, 0, 10),
    ]
    for name in "abcd":
        under_test.add(request(name, [ord(name)] * 300))
    taken = [shape[3] for shape in shapes(step(under_test)) if shape[1] is RowKind.PREFILL]
    assert taken == [63, 32, 32]  # halves, then the least share; one token is the decoding one's


def test_a_worse_priority_gets_only_what_the_better_leaves() -> None:
    under_test = scheduler(num_pages=800, tokens=128)
    under_test.add(request("worse", list(range(500)), priority=1))
    under_test.add(request("better", list(range(500, 700)), priority=0))
    assert shapes(step(under_test)) == [("better", RowKind.PREFILL, 0, 128)]
    assert shapes(step(under_test)) == [
        ("better", RowKind.PREFILL, 128, 72),
        ("worse", RowKind.PREFILL, 0, 56),
    ]


def test_a_better_rank_does_not_wait_behind_a_long_prefill() -> None:
    under_test = scheduler(num_pages=40, tokens=8)
    under_test.add(request("long", list(range(100)), priority=1))
    step(under_test)
    under_test.add(request("short", [7, 7, 7], priority=0))
    under_test.add(request("later", [8, 8, 8], priority=1))
    assert shapes(step(under_test)) == [
        ("short", RowKind.PREFILL, 0, 3),
        ("long", RowKind.PREFILL, 8, 5),
    ]


def test_a_better_rank_does_not_wait_for_a_worse_one_to_share() -> None:
    under_test = scheduler(num_pages=40, tokens=8)
    under_test.add(request("worse", list(range(40)), priority=1))
    step(under_test)
    under_test.add(request("better", list(range(40)), priority=0))
    rows = step(under_test)
    assert [shape[0] for shape in shapes(rows)] == ["better"]


def test_a_known_prefix_is_not_computed_again() -> None:
    under_test = scheduler()
    under_test.add(request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    (row,) = step(under_test)
    under_test.finish(row.sequence)
    under_test.add(request("b", [1, 2, 3, 4, 5, 6, 7, 8]))
    # The second page is known too, but the last token is computed anyway, for its logits.
    (row,) = step(under_test)
    assert (row.start, row.num_tokens) == (4, 4)
    assert row.sequence.num_cached_tokens == 4
    assert (under_test.num_prefix_queries, under_test.num_prefix_hits) == (16, 4)


def test_twins_wait_for_the_one_that_computes_their_prefix() -> None:
    under_test = scheduler(tokens=16)
    for name in "abc":
        under_test.add(request(name, [1, 2, 3, 4, 5]))
    under_test.add(request("other", [9, 9]))
    assert [shape[0] for shape in shapes(step(under_test))] == ["a", "other"]
    assert shapes(step(under_test))[2:] == [
        ("b", RowKind.PREFILL, 4, 1),
        ("c", RowKind.PREFILL, 4, 1),
    ]


def test_without_prefix_cache_nothing_is_shared() -> None:
    under_test = scheduler(tokens=16, prefix_cache=False)
    for name in "ab":
        under_test.add(request(name, [1, 2, 3, 4, 5]))
    assert [row.start for row in step(under_test)] == [0, 0]


def test_the_worst_rank_is_preempted_and_comes_back() -> None:
    under_test = scheduler(num_pages=4, tokens=16)
    under_test.add(request("a", [1] * 3))
    under_test.add(request("b", [2] * 3))
    preempted: list[str] = []
    finished: Counter[str] = Counter()
    for _ in range(30):
        plan = under_test.schedule()
        preempted += [s.request.request_id for s in plan.preempted]
        for row in plan.rows:
            under_test.commit(row, [7] if row.reaches_end else [])
            if row.sequence.num_output_tokens == 9:
                finished[row.sequence.request.request_id] += 1
                under_test.finish(row.sequence)
        under_test.check_integrity()
    assert set(preempted) == {"b"}
    assert finished == {"a": 1, "b": 1}


def test_drafts_get_slots_from_pages_that_nobody_needs() -> None:
    under_test = scheduler(num_pages=3, draft_slots=7)
    under_test.add(request("a", [1, 2, 3]))
    step(under_test)
    (row,) = under_test.schedule().rows
    assert (row.num_tokens, row.draft_slots, len(row.sequence.pages)) == (1, 7, 3)
    under_test.commit(row, [7] * 8)  # all of them were right: 11 of 12 slots are computed
    (row,) = under_test.schedule().rows
    assert (row.start, row.draft_slots, len(row.sequence.pages)) == (11, 0, 3)


def test_draft_pages_are_given_back_before_anybody_is_preempted() -> None:
    under_test = scheduler(num_pages=4, tokens=16, draft_slots=7)
    under_test.add(request("a", [1] * 4))
    under_test.add(request("b", [2] * 3))
    step(under_test)
    first, second = under_test.schedule().rows
    assert (len(first.sequence.pages), len(second.sequence.pages)) == (3, 1)
    assert (first.draft_slots, second.draft_slots) == (7, 0)
    for row in (first, second):
        under_test.commit(row, [7])
    plan = under_test.schedule()
    assert plan.preempted == ()
    assert [len(row.sequence.pages) for row in plan.rows] == [2, 2]


def test_a_page_held_for_drafts_counts_as_the_reserve_of_its_sequence() -> None:
    under_test = scheduler(num_pages=4, tokens=16, draft_slots=7)
    under_test.add(request("a", [1, 2, 3]))
    step(under_test)
    step(under_test)  # now it holds a page for drafts
    under_test.add(request("b", [9, 9]))
    assert [shape[0] for shape in shapes(step(under_test))] == ["a", "b"]


def test_draft_pages_are_given_back_before_a_new_sequence_has_to_wait() -> None:
    under_test = scheduler(num_pages=8, tokens=16, draft_slots=16)
    under_test.add(request("a", [1, 2, 3]))
    step(under_test)
    step(under_test)  # now it holds four pages for drafts
    under_test.add(request("b", [9] * 16))
    assert [shape[0] for shape in shapes(step(under_test))] == ["a", "b"]


def test_prefill_leaves_room_for_the_drafts_that_are_expected() -> None:
    under_test = scheduler(num_pages=40, tokens=17, draft_slots=7)
    under_test.add(request("a", [1, 2, 3]))
    step(under_test)
    under_test.add(request("b", list(range(60))))
    for expected, chunk, room in ((5, 11, 5), (100, 8, 8), (0, 16, 0)):
        plan = under_test.schedule(expected_drafts=expected)
        assert [row.num_tokens for row in plan.rows] == [1, chunk]
        assert plan.draft_room == room
        for row in plan.rows:
            under_test.commit(row, [7] if row.reaches_end else [])


def slot(row: Row, position: int) -> int:
    return row.sequence.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, lengths, aborts, prefix hits and preemptions.

    `written` plays the KV cache: it maps each slot to the whole text up to the token whose K/V
    lies there. A row may only be computed if every slot before it holds its own past.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(num_pages=NUM_PAGES, seqs=3, tokens=6, draft_slots=5)
        self.written: dict[int, tuple[int, ...]] = {}
        self.submitted: list[str] = []
        self.ended: Counter[str] = Counter()

    # Few distinct tokens, so that prefixes are often equal.
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS - 9),
        priority=st.integers(0, 1),
        max_tokens=st.integers(1, 9),
    )
    def arrive(self, prompt: list[int], priority: int, max_tokens: int) -> None:
        name = f"r{len(self.submitted)}"
        self.submitted.append(name)
        self.scheduler.add(request(name, prompt, priority=priority, max_tokens=max_tokens))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [name for name in self.submitted if name not in self.ended]
        sequence = self.scheduler.find(data.draw(st.sampled_from(live)))
        assert sequence is not None
        self.end(sequence.request.request_id)

    @rule(
        token=st.integers(0, 1),
        num_accepted=st.integers(0, 5),
        num_rejected=st.integers(0, 5),
        expected_drafts=st.integers(0, 9),
    )
    def step(
        self, token: int, num_accepted: int = 0, num_rejected: int = 0, expected_drafts: int = 0
    ) -> None:
        plan = self.scheduler.schedule(expected_drafts=expected_drafts)
        assert bool(plan.rows) == self.scheduler.has_work
        assert plan.num_tokens + plan.draft_room == 6
        for row in plan.rows:
            self.compute(row)
            emitted = [token] if row.reaches_end else []
            if row.kind is RowKind.VERIFY:
                emitted = [token] * (1 + min(num_accepted, row.draft_slots))
                num_drafts = min(num_accepted + num_rejected, row.draft_slots)
                self.verify(row, emitted[:-1], num_drafts)
            self.scheduler.commit(row, emitted)
        for row in plan.rows:
            sequence = row.sequence
            if sequence.num_output_tokens >= sequence.request.sampling.max_tokens:
                self.end(sequence.request.request_id)

    def compute(self, row: Row) -> None:
        sequence = row.sequence
        assert row.start == sequence.num_committed
        tokens = tuple(sequence.token_ids)
        for position in range(row.start):
            assert self.written[slot(row, position)] == tokens[: position + 1]
        for position in range(row.start, row.start + row.num_tokens):
            self.written[slot(row, position)] = tokens[: position + 1]

    def verify(self, row: Row, accepted: list[int], num_drafts: int) -> None:
        """Write the K/V of drafts behind the row; that of rejected ones is of no text."""
        tokens = (*row.sequence.token_ids, *accepted)
        start = row.start + row.num_tokens
        for position in range(start, start + num_drafts):
            right = position < len(tokens)
            self.written[slot(row, position)] = tokens[: position + 1] if right else (-1,)

    def end(self, name: str) -> None:
        sequence = self.scheduler.find(name)
        assert sequence is not None
        self.scheduler.finish(sequence)
        self.ended[name] += 1

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.submitted) - len(
            self.ended
        )

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step(token=0)
        assert self.ended == Counter(self.submitted), "a request did not end exactly once"
        self.scheduler.check_integrity()


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
