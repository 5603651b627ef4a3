"""Guesses from known text in the budget: beside blocks, without a drafter, and bad ones."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import NoDraft
from adaflash.engine.speculation.budget import (
    Allotment,
    Budget,
    Estimate,
    Guesses,
    Order,
    best_prefixes,
)
from adaflash.engine.speculation.costs import CostCurve, CostModel
from adaflash.engine.speculation.goodput import FIRST_BLOCKS
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.policies import drafting_budget
from adaflash.engine.speculation.suffixes import Match
from adaflash.engine.types import Row, RowKind, StepPlan
from tests.engine.speculation.simulated import (
    BLOCK,
    LIMITS,
    WIDTHS,
    bending,
    constant,
    decoding_row,
    decoding_rows,
    linear,
    nearly_flat,
    plan_of,
    timed,
    world,
)
from tests.engine.speculation.test_budget import work_of

LONGEST = 8  # drafts of a guess
POLICIES = [Policy.FIXED, Policy.THRESHOLD, Policy.GOODPUT]


def guesses_of(rows: Many[Row], chances: Many[float | None], matched: int = 12) -> Guesses:
    """Each row's guess has the same chance all along; None: there is none."""
    match = Match(matched, tuple(range(LONGEST)), is_own=True)
    return Guesses(
        tuple(rows),
        tuple(None if chance is None else match for chance in chances),
        np.array([chance or 0.0 for chance in chances])[:, None].repeat(LONGEST, axis=1),
    )


def budget_of(
    policy: Policy, costs: CostModel | None = None, widths: tuple[int, ...] = ()
) -> Budget:
    length = 3 if policy is Policy.FIXED else None
    config = SpeculationConfig(policy=policy, fixed_length=length)
    return drafting_budget(config, widths, LIMITS, costs or nearly_flat())


def allot(
    budget: Budget, plan: StepPlan, guesses: Guesses, chance: float = 0.5
) -> tuple[Order, Allotment]:
    """One step; the drafter gives all its drafts this chance."""
    order = budget.order(plan, guesses)
    conditional = np.full((len(order.rows), max(0, order.width - 1)), chance)
    return order, budget.allot(order, Estimate(conditional, np.full(len(order.rows), 0.5)))


def drafting(chance: float, num_rows: int = 8) -> Budget:
    """A goodput budget that knows its drafter: every draft has this chance."""
    simulation = world(nearly_flat, constant(chance))
    simulation.play(decoding_rows(num_rows), 30)
    return simulation.budget


# --- without a drafter


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        (Policy.FIXED, [3, 0, 0, 3]),  # the third is below the floor
        (Policy.THRESHOLD, [8, 0, 1, 4]),  # 1.3 times the expected 6.70, 1.43 and 3.42 tokens
        (Policy.GOODPUT, [8, 0, 4, 8]),  # of the third up to a chance of 0.3**4: drafts are cheap
    ],
)
def test_without_a_drafter_guesses_alone_are_verified(policy: Policy, lengths: list[int]) -> None:
    rows = decoding_rows(4)
    budget = budget_of(policy)
    order, allotment = allot(budget, plan_of(rows), guesses_of(rows, [0.93, None, 0.3, 0.75]))
    assert (order.width, order.no_draft) == (0, NoDraft.OFF)
    assert allotment.lengths.tolist() == []
    found = allotment.guess_lengths.tolist()
    assert found == lengths
    stats = budget.learn(order, allotment, [], work_of(sum(found), 4 + sum(found)))
    assert not stats.is_paying
    survival = np.cumprod(np.array([[0.93], [0.3], [0.75]]) * np.ones(LONGEST), axis=1)
    verified = np.arange(LONGEST) < np.array(found)[[0, 2, 3], None]
    assert stats.predicted_accepted == pytest.approx((survival * verified).sum(axis=0).tolist())


def test_off_verifies_no_guess() -> None:
    rows = decoding_rows(2)
    _, allotment = allot(budget_of(Policy.OFF), plan_of(rows), guesses_of(rows, [0.99, 0.99]))
    assert allotment.guess_lengths.tolist() == [0, 0]


def test_goodput_verifies_what_pays_and_the_better_guess_first() -> None:
    rows = decoding_rows(64)
    chances = [0.95 if number % 2 else 0.2 for number in range(64)]
    _, allotment = allot(
        budget_of(Policy.GOODPUT, bending()), plan_of(rows), guesses_of(rows, chances)
    )
    assert allotment.guess_lengths[1::2].min() >= 3
    assert (allotment.guess_lengths[::2] == 0).all()
    _, allotment = allot(
        budget_of(Policy.GOODPUT, linear()), plan_of(rows), guesses_of(rows, [0.9] * 64)
    )
    assert (allotment.guess_lengths == 0).all()  # a draft costs what a sure token costs


@pytest.mark.parametrize("policy", POLICIES)
def test_a_guess_stops_at_slots_room_and_the_request_s_end(policy: Policy) -> None:
    rows = [
        decoding_row(slots=2),
        decoding_row(context=32, prompt=8, max_tokens=24 + 2),
        decoding_row(slots=0),
        decoding_row(),
    ]
    guesses = guesses_of(rows, [0.95] * 4)
    _, allotment = allot(budget_of(policy), plan_of(rows), guesses)
    most = 3 if policy is Policy.FIXED else 8
    assert allotment.guess_lengths.tolist() == [2, 1, 0, most]
    _, allotment = allot(budget_of(policy), plan_of(rows, room=3), guesses)
    assert allotment.guess_lengths.sum() == 3
    _, allotment = allot(budget_of(policy), plan_of(rows, room=0), guesses)
    assert allotment.guess_lengths.sum() == 0


def test_prompts_leave_room_for_guesses_that_are_likely_to_be_right() -> None:
    rows = decoding_rows(4)
    for chances, expected in (([0.9] * 4, 21), ([None] * 4, 0)):
        budget = budget_of(Policy.GOODPUT)
        plan = plan_of(rows, room=0, num_prefill=50)
        order, allotment = allot(budget, plan, guesses_of(rows, chances))
        budget.learn(order, allotment, [], work_of(0, 54))
        assert budget.expected_drafts == expected


# --- beside a drafter


def test_a_row_whose_guess_promises_more_than_blocks_usually_do_is_not_drafted() -> None:
    rows = decoding_rows(8)
    chances = [0.97, 0.97, None, 0.1, None, 0.97, None, None]
    order, allotment = allot(drafting(0.6), plan_of(rows), guesses_of(rows, chances), 0.6)
    assert order.places == (2, 3, 4, 6, 7)
    assert order.rows == tuple(rows[place] for place in order.places)
    assert (allotment.guess_lengths > 0).tolist() == [chance == 0.97 for chance in chances]
    assert (allotment.lengths > 0).all()


def test_of_a_block_and_a_guess_the_better_one_is_verified() -> None:
    """The guess looked worse than blocks usually are; this block is worse still."""
    rows = decoding_rows(8)
    order, allotment = allot(drafting(0.8), plan_of(rows), guesses_of(rows, [0.7] * 8), 0.2)
    assert len(order.rows) == 8
    assert (allotment.lengths == 0).all()
    assert (allotment.guess_lengths > 0).all()
    order, allotment = allot(drafting(0.8), plan_of(rows), guesses_of(rows, [0.7] * 8), 0.8)
    assert (allotment.lengths > 0).all()
    assert (allotment.guess_lengths == 0).all()


def test_a_drafter_pass_for_few_rows_is_not_made_if_it_costs_more_than_it_gives() -> None:
    """It pays for all 16 rows; where 15 have good guesses, the last one waits for no block."""
    costs = replace(bending(), denoise=nearly_flat().verify)  # as dear as a step
    config = SpeculationConfig()
    simulation = world(bending, constant(0.85))
    simulation.costs, simulation.budget = costs, drafting_budget(config, WIDTHS, LIMITS, costs)
    rows = decoding_rows(16)
    simulation.play(rows, 40)
    order, allotment = allot(simulation.budget, plan_of(rows), guesses_of(rows, [None] * 16), 0.85)
    assert len(order.rows) == 16
    guesses = guesses_of(rows, [0.98] * 15 + [None])
    order, allotment = allot(simulation.budget, plan_of(rows), guesses, 0.85)
    assert (order.width, order.no_draft) == (0, NoDraft.LOOKUP)
    assert (allotment.guess_lengths[:15] > 3).all()
    stats = simulation.budget.learn(order, allotment, [], work_of(9, 9))
    assert stats.is_paying  # that is said of the load without guesses


def test_whole_blocks_for_calibration_are_verified_instead_of_guesses() -> None:
    rows = decoding_rows(4)
    budget = budget_of(Policy.GOODPUT, widths=WIDTHS)
    for _ in range(FIRST_BLOCKS // 4):
        order, allotment = allot(budget, plan_of(rows), guesses_of(rows, [0.99] * 4))
        assert allotment.lengths.tolist() == [BLOCK - 1] * 4
        assert allotment.guess_lengths.tolist() == [0] * 4
    order, allotment = allot(budget, plan_of(rows), guesses_of(rows, [0.99] * 4))
    assert (order.width, order.no_draft) == (0, NoDraft.LOOKUP)


def test_where_drafting_does_not_pay_guesses_may() -> None:
    simulation = world(nearly_flat, constant(0.0), head=lambda truth: truth + 0.3)
    rows = decoding_rows(8)
    assert not simulation.play(rows, 100)[-1].is_drafting
    order, allotment = allot(simulation.budget, plan_of(rows), guesses_of(rows, [0.9] * 8))
    assert order.no_draft is NoDraft.NO_GAIN
    assert (allotment.guess_lengths > 0).all()


def test_fixed_uses_a_guess_above_the_floor_and_a_block_otherwise() -> None:
    rows = decoding_rows(4)
    budget = budget_of(Policy.FIXED, widths=WIDTHS)
    order, allotment = allot(budget, plan_of(rows), guesses_of(rows, [0.9, None, 0.4, 0.5]))
    assert order.places == (1, 2)
    assert allotment.lengths.tolist() == [3, 3]
    assert allotment.guess_lengths.tolist() == [3, 0, 0, 3]
    order, _ = allot(budget, plan_of(rows), guesses_of(rows, [0.9] * 4))
    assert (order.width, order.no_draft) == (0, NoDraft.LOOKUP)


@pytest.mark.parametrize(("matched", "is_used"), [(7, False), (8, True)])
def test_threshold_keeps_to_its_rule_but_for_long_matches(matched: int, is_used: bool) -> None:
    rows = decoding_rows(2)
    budget = budget_of(Policy.THRESHOLD, widths=WIDTHS)
    guesses = guesses_of(rows, [0.9, None], matched)
    order, allotment = allot(budget, plan_of(rows), guesses)
    assert order.places == ((1,) if is_used else (0, 1))
    assert (allotment.guess_lengths > 0).tolist() == [is_used, False]
    assert allotment.lengths[-1] == 9


def test_only_proposed_drafts_pay_the_draft_head() -> None:
    survival = np.array([[0.8, 0.7], [0.9, 0.85]])
    head_s = CostCurve([1, 9], [5.0, 5.0])
    for num_blocks, expected, rate in ((0, [2, 2], 5.25 / 1.4), (1, [0, 2], 3.75 / 1.2)):
        found, best = best_prefixes(
            survival,
            9,
            num_rows=2,
            cost_s=lambda count: np.asarray(1.0 + 0.1 * count, dtype=np.float64),
            propose_s=head_s.at,
            num_blocks=num_blocks,
        )
        assert found.tolist() == expected
        assert best == pytest.approx(rate)


def test_if_the_draft_head_costs_more_than_blocks_are_worth_guesses_are_verified_alone() -> None:
    """Also the one whose row has a block that promises more."""
    costs = nearly_flat()
    rows = decoding_rows(8)
    simulation = world(nearly_flat, constant(0.8))
    simulation.budget = drafting_budget(SpeculationConfig(), WIDTHS, LIMITS, costs)
    simulation.play(rows, 30)
    costs.propose = CostCurve([1, 1000], [1.0, 1.0])
    simulation.budget._policy._outlook = lambda load: (16, 2.0)  # type: ignore[attr-defined]
    simulation.budget._policy._pays_beside_guesses = lambda *_: True  # type: ignore[attr-defined]
    order, allotment = allot(simulation.budget, plan_of(rows), guesses_of(rows, [0.7] * 8), 0.8)
    assert len(order.rows) == 8
    assert (allotment.lengths == 0).all()
    assert (allotment.guess_lengths > 0).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], list[float | None], int]:
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 15),
                st.integers(1, 20),
                st.one_of(st.none(), st.sampled_from([0.05, 0.5, 0.99])),
            ),
            max_size=12,
        )
    )
    rows = [
        decoding_row(context=20, slots=slots, max_tokens=12 + left) for slots, left, _ in shapes
    ]
    return rows, [chance for _, _, chance in shapes], draw(st.sampled_from([0, 1, 3, 17, 60, 1000]))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(Policy)),
    st.sampled_from([(), WIDTHS]),
    st.sampled_from([nearly_flat, bending, linear]),
    st.floats(0.0, 1.0),
    st.lists(batches(), min_size=1, max_size=8),
)
def test_no_policy_exceeds_room_slots_or_what_a_request_may_get_with_guesses(
    policy: Policy,
    widths: tuple[int, ...],
    machine: Callable[[], CostModel],
    chance: float,
    loads: list[tuple[list[Row], list[float | None], int]],
) -> None:
    budget = budget_of(policy, machine(), widths)
    if widths:
        rows = decoding_rows(8)
        for _ in range(4):
            allot(budget, plan_of(rows), guesses_of(rows, [None] * 8), chance)
    for asked, chances, room in loads:
        rows = tuple(asked)
        order, allotment = allot(
            budget, plan_of(rows, room=room), guesses_of(rows, chances), chance
        )
        assert allotment.lengths.sum() + allotment.guess_lengths.sum() <= room
        total = allotment.guess_lengths.copy()
        for place, length in zip(order.places, allotment.lengths.tolist(), strict=True):
            assert length == 0 or total[place] == 0, "two drafts for one place"
            assert length <= order.width - 1
            total[place] += length
        for row, given_chance, guess, length in zip(
            rows, chances, allotment.guess_lengths.tolist(), total.tolist(), strict=True
        ):
            left = row.sequence.request.sampling.max_tokens - row.sequence.num_output_tokens
            assert 0 <= length <= min(row.draft_slots, left - 1)
            assert guess <= (LONGEST if given_chance is not None else 0)
        budget.learn(order, allotment, [0] * len(order.rows), work_of(0, len(rows) or 1))


# --- over whole texts

Writer = Callable[[list[int], Match | None], int]  # the next token of a text, with what is guessed


def contrary(text: list[int], guess: Match | None) -> int:
    """Over three tokens, so that there is always a guess; and it is always wrong."""
    return 0 if guess is None else (guess.continuation[0] + 1) % 3


def random_writer() -> Writer:
    rng = np.random.default_rng(0)
    return lambda text, guess: int(rng.integers(3))


def teasing() -> Writer:
    """Repeats 9 tokens, and breaks off then."""
    rng = np.random.default_rng(0)

    def write(text: list[int], guess: Match | None) -> int:
        place = len(text) % 10
        if place == 0 or len(text) < 20:
            return int(rng.integers(1000))
        return text[len(text) - 20 + place % 2]

    return write


def cost_against_plain(
    machine: Callable[[], CostModel], writer: Writer, num_rows: int, steps: int
) -> float:
    """Seconds a token with lookup against those of plain decoding, by the true costs."""
    source, budget = Lookup(LONGEST, store_tokens=1000), budget_of(Policy.GOODPUT, machine())
    sequences = [row.sequence for row in decoding_rows(num_rows)]
    seconds = plain_s = num_tokens = 0.0
    for _ in range(steps):
        rows = [Row(s, len(s.token_ids) - 1, 1, RowKind.VERIFY, 15) for s in sequences]
        plan = plan_of(rows)
        guesses = source.guess(rows)
        order = budget.order(plan, guesses)
        allotment = budget.allot(order)
        emitted = []
        for sequence, match, length in zip(
            sequences, guesses.matches, allotment.guess_lengths.tolist(), strict=True
        ):
            written: list[int] = []
            while len(written) <= length:
                token = writer([*sequence.token_ids, *written], None if written else match)
                written.append(token)
                if match is None or match.continuation[len(written) - 1 : len(written)] != (token,):
                    break
            emitted.append(written)
        num_drafts = int(allotment.guess_lengths.sum())
        counts = work_of(num_drafts, num_rows + num_drafts)
        counts = replace(
            counts, block_rows=0, num_looked_up=num_drafts, num_choices=num_rows + num_drafts
        )
        work = timed(counts, machine())
        budget.learn(order, allotment, [], work)
        source.learn(guesses, emitted)
        seconds += work.seconds
        plain = replace(counts, num_drafts=0, num_looked_up=0, num_tokens=num_rows)
        plain_s += timed(replace(plain, num_choices=num_rows), machine()).seconds
        num_tokens += sum(map(len, emitted))
        for sequence, written in zip(sequences, emitted, strict=True):
            sequence.token_ids += written
    return (seconds / num_tokens) / (plain_s / (num_rows * steps))


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("machine", [nearly_flat, bending, linear])
def test_useless_guesses_cost_next_to_nothing(
    machine: Callable[[], CostModel], num_rows: int
) -> None:
    """Every one of them is wrong."""
    assert cost_against_plain(machine, contrary, num_rows, 300) < 1.03


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("machine", [nearly_flat, bending, linear])
@pytest.mark.parametrize("writer", [random_writer, teasing])
def test_texts_that_hardly_repeat_themselves_cost_no_more_than_plain_decoding(
    machine: Callable[[], CostModel], writer: Callable[[], Writer], num_rows: int
) -> None:
    assert cost_against_plain(machine, writer(), num_rows, 300) < 1.01


def test_a_text_that_repeats_itself_is_written_as_fast_as_guesses_are_long() -> None:
    def period(text: list[int], guess: Match | None) -> int:
        return len(text) % 50

    assert cost_against_plain(nearly_flat, period, 4, 600) < 1.15 / (1 + LONGEST)
