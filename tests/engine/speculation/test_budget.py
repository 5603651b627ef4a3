"""The budget: the joint optimum, what fits, and what a step teaches."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.engine.config import Policy
from adaflash.engine.messages import NoDraft
from adaflash.engine.pages import PagePool
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.speculation.budget import (
    Allotment,
    Budget,
    Estimate,
    best_prefixes,
    fit,
    load_of,
    usable,
)
from adaflash.engine.speculation.calibration import Floats, Ints
from adaflash.engine.speculation.costs import StepWork
from adaflash.engine.speculation.policies import plain_budget
from adaflash.engine.types import Request, SamplingParams
from tests.engine.speculation.simulated import (
    BLOCK,
    LIMITS,
    ROOM,
    World,
    budget_of,
    constant,
    decoding_row,
    decoding_rows,
    nearly_flat,
    plan_of,
    timed,
    world,
)

CostFunction = Callable[[Ints], Floats]
PER_DRAFT = 1e-3


def flat_cost(num_drafts: Ints) -> Floats:
    return np.full(len(num_drafts), 0.01)


def zero_cost(num_drafts: Ints) -> Floats:
    return np.zeros(len(num_drafts))


def linear_cost(num_drafts: Ints) -> Floats:
    return np.array(PER_DRAFT * (3 + num_drafts), dtype=np.float64)


@st.composite
def staircases(draw: st.DrawFn) -> CostFunction:
    """A step's cost that never falls with the drafts, and mostly stands still."""
    first = draw(st.floats(1e-3, 1.0))
    climbs = draw(st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0]), min_size=9, max_size=9))
    heights = first * (1 + np.cumsum([0.0, *climbs]))

    def cost_s(num_drafts: Ints) -> Floats:
        found: Floats = heights[num_drafts]
        return found

    return cost_s


COSTS = st.one_of(staircases(), st.sampled_from([flat_cost, zero_cost, linear_cost]))
CHANCES = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))


@st.composite
def falling(draw: st.DrawFn) -> Floats:
    """Survival of up to 3 blocks of up to 3 drafts, certain and hopeless ones among them."""
    num_rows, num_drafts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = st.lists(CHANCES, min_size=num_drafts, max_size=num_drafts)
    conditional = draw(st.lists(rows, min_size=num_rows, max_size=num_rows))
    return np.cumprod(np.array(conditional), axis=1)


def rate_of(lengths: Ints, survival: Floats, num_rows: int, cost_s: CostFunction) -> float:
    """Expected tokens per second when so much of each block is verified."""
    tokens = num_rows + usable(survival, lengths).sum()
    return float(tokens / max(float(cost_s(np.array([lengths.sum()]))[0]), 1e-9))


@settings(max_examples=200, deadline=None)
@given(falling(), st.data(), COSTS, st.integers(0, 9), st.integers(0, 2))
def test_no_choice_of_lengths_beats_the_one_that_is_made(
    survival: Floats, data: st.DataObject, cost_s: CostFunction, room: int, num_others: int
) -> None:
    """num_others: rows that are decoded and not drafted."""
    num_blocks, num_drafts = survival.shape
    caps = data.draw(st.lists(st.integers(0, num_drafts), min_size=num_blocks, max_size=num_blocks))
    num_rows = num_blocks + num_others
    lengths, rate = best_prefixes(usable(survival, caps), room, num_rows=num_rows, cost_s=cost_s)
    possible = [
        np.array(choice)
        for choice in itertools.product(*(range(cap + 1) for cap in caps))
        if sum(choice) <= room
    ]
    assert any((lengths == choice).all() for choice in possible)  # within caps and room
    best = max(rate_of(choice, survival, num_rows, cost_s) for choice in possible)
    assert rate == pytest.approx(best)
    assert rate_of(lengths, survival, num_rows, cost_s) == pytest.approx(rate)
    assert (usable(survival, lengths) > 0).sum() == lengths.sum()  # none that cannot survive


def test_the_best_total_may_lie_behind_worse_ones() -> None:
    """The second step of the staircase pays, though the first alone does not."""
    heights = np.array([1.0, 1.9, 1.9, 1.9])
    lengths, rate = best_prefixes(
        np.array([[0.8, 0.7, 0.6]]), ROOM, num_rows=1, cost_s=lambda drafts: heights[drafts]
    )
    assert lengths.tolist() == [3]
    assert rate == pytest.approx(3.1 / 1.9)


def test_drafts_that_gain_nothing_are_not_verified() -> None:
    """At equal rates fewer tokens are computed."""
    survival, drafts_cost_as_much_as_rows = np.ones((2, 3)), linear_cost
    lengths, rate = best_prefixes(survival, ROOM, num_rows=3, cost_s=drafts_cost_as_much_as_rows)
    assert lengths.tolist() == [0, 0]
    assert rate == pytest.approx(1 / PER_DRAFT)


def test_equal_chances_are_taken_from_the_front_of_a_block() -> None:
    lengths, _ = best_prefixes(np.ones((8, 15)), 100, num_rows=8, cost_s=flat_cost)
    assert lengths.tolist() == [15] * 6 + [10, 0]


def test_a_draft_that_cannot_survive_is_not_verified_even_if_that_made_the_step_cheaper() -> None:
    heights = np.array([1.0, 0.9, 0.1, 0.1])
    lengths, _ = best_prefixes(
        np.array([[0.5, 0.0, 0.0]]), ROOM, num_rows=1, cost_s=lambda drafts: heights[drafts]
    )
    assert lengths.tolist() == [1]


def test_without_blocks_nothing_is_verified() -> None:
    lengths, rate = best_prefixes(np.zeros((0, 3)), ROOM, num_rows=4, cost_s=flat_cost)
    assert lengths.tolist() == []
    assert rate == pytest.approx(400)


def test_beyond_its_cap_a_block_is_of_no_use() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    expected = [[0.9, 0.8, 0.0], [0.0, 0.0, 0.0]]
    assert usable(survival, (2, 0)).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 15)), max_size=12), st.integers(0, 60))
def test_what_is_fitted_keeps_to_caps_and_room_and_cuts_the_longest(
    wishes: list[tuple[int, int]], room: int
) -> None:
    lengths = np.array([wish for wish, _ in wishes], dtype=np.int64)
    caps = [cap for _, cap in wishes]
    within = np.minimum(lengths, np.array(caps, dtype=np.int64))
    fitted = fit(lengths, caps, room)
    assert fitted.sum() == min(room, within.sum())
    assert ((fitted >= 0) & (fitted <= within)).all()
    cut = fitted < within
    # None that was cut is shorter, by more than the odd token, than any other one.
    assert not cut.any() or fitted[cut].min() >= fitted.max() - 1


def test_what_fits_stays_as_it_is() -> None:
    wanted = np.array([3, 0, 9])
    assert fit(wanted, [5, 5, 5], 8).tolist() == [3, 0, 5]
    assert wanted.tolist() == [3, 0, 9]


@pytest.mark.parametrize(
    ("context", "slots", "max_tokens", "max_model_len", "cap"),
    [
        (20, 15, 1000, 1000, 15),
        (20, 3, 1000, 1000, 3),
        (20, 0, 1000, 1000, 0),
        (20, 15, 12 + 5, 1000, 4),  # 12 are out; of 5 more the last is the target's own
        (20, 15, 12 + 1, 1000, 0),
        (20, 15, 1000, 26, 5),
        (20, 15, 1000, 21, 0),
    ],
)
def test_a_row_cannot_use_more_than_slots_and_the_end_of_its_request(
    context: int, slots: int, max_tokens: int, max_model_len: int, cap: int
) -> None:
    row = decoding_row(context=context, slots=slots, max_tokens=max_tokens, prompt=8)
    limits = replace(LIMITS, max_model_len=max_model_len)
    load = load_of(plan_of([row], room=7, num_prefill=9), limits)
    assert load.caps == (cap,)
    assert (load.num_rows, load.num_tokens, load.room) == (1, 10, 7)
    assert load.has_prefill
    assert load.context_tokens == context


def test_only_rows_with_the_slots_and_a_use_for_drafts_are_candidates() -> None:
    rows = [decoding_row(slots=15), decoding_row(slots=14), decoding_row(slots=3)]
    rows.append(decoding_row(slots=15, max_tokens=25))  # 24 are out
    load = load_of(plan_of(rows), LIMITS)
    assert [load.candidates(width) for width in (4, 15, 16)] == [[0, 1, 2], [0, 1], [0]]


def work_of(num_drafts: int, num_tokens: int) -> StepWork:
    counts = StepWork(
        block_rows=BLOCK, num_drafts=num_drafts, num_tokens=num_tokens, num_choices=num_drafts + 1
    )
    return timed(counts, nearly_flat())


def step_of(budget: Budget, *, num_prefill: int = 0) -> tuple[Allotment, list[float], float]:
    """One step of one row; what the budget predicted: drafts by position, and seconds."""
    order = budget.order(plan_of(decoding_rows(1), num_prefill=num_prefill))
    conditional = np.full((1, order.width - 1), 0.5)
    allotment = budget.allot(order, Estimate(conditional, np.array([0.5])))
    num_drafts = int(allotment.lengths.sum())
    work = work_of(num_drafts, 1 + num_drafts + num_prefill)
    stats = budget.learn(order, allotment, [0], work)
    return allotment, stats.predicted_accepted, stats.predicted_s


def test_a_step_is_compared_with_what_was_predicted() -> None:
    allotment, accepted, seconds = step_of(budget_of(nearly_flat(), Policy.FIXED, length=2))
    assert allotment.lengths.tolist() == [2]
    assert accepted == pytest.approx([0.5, 0.25, 0.0])
    assert seconds == pytest.approx(work_of(2, 3).seconds)


def test_steps_with_prefill_teach_the_costs_nothing() -> None:
    costs = nearly_flat()
    budget = budget_of(costs, Policy.FIXED, length=2)
    _, _, seconds = step_of(budget, num_prefill=50)
    assert seconds == 0
    assert costs.speed == 1.0
    assert (costs.verify.seconds == nearly_flat().verify.seconds).all()


def test_a_plain_budget_drafts_nothing_and_predicts_nothing() -> None:
    budget = plain_budget(LIMITS)
    order = budget.order(plan_of(decoding_rows(3)))
    assert (order.width, order.no_draft) == (0, NoDraft.OFF)
    stats = budget.learn(order, None, [], work_of(0, 3))
    assert (stats.no_draft, stats.is_paying, stats.predicted_s) == (NoDraft.OFF, False, 0.0)
    assert budget.expected_drafts == 0


@pytest.mark.parametrize("nonsense", [np.nan, np.inf])
@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.THRESHOLD, Policy.GOODPUT])
def test_a_head_that_says_nothing_harms_nobody(policy: Policy, nonsense: float) -> None:
    """Float16 overflows: a block of NaN is worth nothing, and is forgotten with its step."""
    length = 3 if policy is Policy.FIXED else None
    budget = budget_of(nearly_flat(), policy, length=length)
    simulation = World(constant(0.9), nearly_flat(), budget)
    rows = decoding_rows(8)
    simulation.head = lambda truth: truth * nonsense
    simulation.play(rows, 5)
    simulation.head = lambda truth: truth
    assert simulation.play(rows, 100)[-1].lengths.sum() > 8


def served(budget: Budget, *, num_steps: int, longest: int = 40) -> list[int]:
    """Drafts of each step with decoding rows, while more prompts are waiting than fit."""
    scheduler = Scheduler(
        PagePool(2000, 16),
        max_num_seqs=16,
        max_batched_tokens=64,
        prefix_cache=False,
        draft_slots=BLOCK - 1,
    )
    names, num_drafts = itertools.count(), list[int]()
    sampling = SamplingParams(seed=0, max_tokens=longest)
    for _ in range(num_steps):
        while scheduler.num_waiting < 3:
            scheduler.add(
                Request(request_id=str(next(names)), prompt_ids=[1] * 300, sampling=sampling)
            )
        plan = scheduler.schedule(expected_drafts=budget.expected_drafts)
        order, allotment = budget.order(plan), None
        if order.width:
            certain = np.full((len(order.rows), order.width - 1), 0.95)
            allotment = budget.allot(order, Estimate(certain, certain[:, 0]))
        lengths = allotment.lengths.tolist() if allotment else []
        of_row = dict(zip(order.rows, lengths, strict=True))
        work = work_of(sum(lengths), plan.num_tokens + sum(lengths))
        assert work.num_tokens <= 64
        if plan.decoding:
            budget.learn(order, allotment, lengths, work)
            num_drafts.append(sum(lengths))
        for row in plan.rows:
            scheduler.commit(row, [5] * (of_row.get(row, 0) + 1) if row.reaches_end else [])
            if row.sequence.num_output_tokens >= longest:
                scheduler.finish(row.sequence)
    return num_drafts


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.THRESHOLD, Policy.GOODPUT])
def test_drafts_get_room_while_prompts_are_waiting(policy: Policy) -> None:
    """Prefill fills what is not expected to be needed, so something must be expected."""
    length = 3 if policy is Policy.FIXED else None
    drafts = served(budget_of(nearly_flat(), policy, length=length), num_steps=300)
    late = drafts[100:]
    assert np.mean([count > 0 for count in late]) > 0.6


def test_nothing_is_expected_of_a_policy_that_does_not_draft() -> None:
    simulation = world(nearly_flat, constant(0.0), head=lambda truth: truth + 0.5)
    rows = decoding_rows(8)
    assert not simulation.play(rows, 20)[-1].is_drafting
    for _ in range(5):
        simulation.step(rows, room=0)
        assert simulation.budget.expected_drafts == 0


def test_drafts_take_nothing_from_prefill_when_nobody_decodes() -> None:
    # BUG: what the last decoding step made the budget expect is kept from prompts for as long as
    # only prompts are computed.
    scheduler = Scheduler(
        PagePool(100, 16), max_num_seqs=4, max_batched_tokens=64, prefix_cache=False, draft_slots=15
    )
    sampling = SamplingParams(seed=0, max_tokens=4)
    scheduler.add(Request(request_id="a", prompt_ids=[1] * 300, sampling=sampling))
    (row,) = scheduler.schedule(expected_drafts=60).rows
    assert row.num_tokens == 64
