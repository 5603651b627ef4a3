"""The cost model: what it reads, what it learns, and what it makes of files."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.engine.speculation import cost_file
from adaflash.engine.speculation.budget import best_prefixes, usable
from adaflash.engine.speculation.cost_file import KeptCosts
from adaflash.engine.speculation.costs import (
    CONTEXT_UNIT,
    CostCurve,
    CostModel,
    Floats,
    Ints,
    StepWork,
    load_costs,
)
from tests.engine.speculation.simulated import (
    GRID,
    bending,
    nearly_flat,
    timed,
)

MACHINES: list[Callable[[], CostModel]] = [nearly_flat, bending]


CURVES = ("denoise", "propose", "verify", "choose")


def at(curve: CostCurve, rows: int, context: int = 0) -> float:
    return float(curve.at(np.array([rows]), context)[0])


def test_between_entries_it_is_linear_and_beyond_them_in_proportion() -> None:
    curve = CostCurve([2, 4, 8], [1.0, 3.0, 4.0])
    read = curve.at(np.array([0, 1, 2, 3, 4, 6, 8, 16, 80])).tolist()
    assert read == [0.0, 1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 8.0, 40.0]


def test_context_is_paid_for_by_the_token() -> None:
    curve = CostCurve([1, 4], [1.0, 2.0], per_context_unit=0.5)
    assert at(curve, 4, 3 * CONTEXT_UNIT) == pytest.approx(3.5)
    assert at(curve, 8, CONTEXT_UNIT) == pytest.approx(4.5)
    assert at(curve, 0, 3 * CONTEXT_UNIT) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 1.0)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 3.0)), max_size=8),
)
def test_more_rows_never_read_cheaper(
    table: list[tuple[int, float]], observed: list[tuple[int, float]]
) -> None:
    """Whatever was measured, and whatever was learnt."""
    unique = dict(sorted(table))
    curve = CostCurve(list(unique), list(unique.values()))
    for rows, seconds in observed:
        curve.learn(rows, 0, seconds)
    read = curve.at(np.arange(200))
    assert (np.diff(read) >= -1e-12 * read[1:]).all()
    assert np.isfinite(read).all()
    assert (read[1:] > 0).all()


def test_a_true_curve_is_found_from_any_samples() -> None:
    """Each with its price of context, from a table that knows neither."""
    rng = np.random.default_rng(0)
    truth = CostCurve([1, 8, 64, 256], [1e-3, 1.2e-3, 2e-3, 6e-3], per_context_unit=5e-4)
    curve = CostCurve([1, 8, 64, 256], [2e-3] * 4)
    for _ in range(12_000):
        rows, context = int(rng.integers(1, 256)), int(rng.integers(0, 3 * CONTEXT_UNIT))
        curve.learn(rows, context, at(truth, rows, context) * rng.lognormal(0, 0.05))
    for rows in (8, 32, 64, 128, 256):
        assert at(curve, rows) == pytest.approx(at(truth, rows), rel=0.1)
    assert curve.per_context_unit == pytest.approx(5e-4, rel=0.1)


@pytest.mark.parametrize("rows", [1, 3, 8, 40, 64, 200])
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_what_is_seen_again_and_again_is_believed(rows: int, factor: float) -> None:
    """Inside the table and beyond it."""
    curve = CostCurve([1, 8, 16, 32, 64], [1.0, 1.0, 2.0, 2.0, 3.0])
    seconds = factor * at(curve, rows)
    for _ in range(500):
        curve.learn(rows, 0, seconds)
    assert at(curve, rows) == pytest.approx(seconds, rel=0.01)


def test_one_disturbed_measurement_does_not_weigh_on_larger_steps() -> None:
    """Nobody makes the step that would correct it."""
    curve = CostCurve([1, 8, 16, 32, 64], [1.0, 1.1, 50.0, 1.3, 1.5])
    assert at(curve, 32) == pytest.approx(1.3)
    assert 1.1 <= at(curve, 16) <= 1.3


def test_a_table_that_is_too_high_below_is_corrected_from_above() -> None:
    curve = CostCurve([1, 8, 64], [5.0, 5.0, 5.0])
    for _ in range(1000):
        curve.learn(64, 0, 2.0)
    assert at(curve, 64) == pytest.approx(2.0, rel=0.01)
    assert at(curve, 8) <= 2.1


def test_no_rows_teach_nothing() -> None:
    curve = CostCurve([1, 2], [1.0, 2.0])
    curve.learn(0, 500, 9.0)
    assert (curve.seconds.tolist(), curve.per_context_unit) == ([1.0, 2.0], 0.0)


def step_work(num_rows: int, num_drafts: int, *, width: int = 16) -> StepWork:
    return StepWork(
        block_rows=num_rows * width if num_drafts else 0,
        num_drafts=num_drafts,
        num_tokens=num_rows + num_drafts,
        num_choices=num_rows + num_drafts,
        context_tokens=num_rows * 32,
        block_context_tokens=num_rows * 32 if num_drafts else 0,
    )


def test_drafts_that_were_looked_up_cost_no_drafting() -> None:
    costs = bending()
    looked_up = replace(step_work(4, 8), block_rows=0, block_context_tokens=0, num_looked_up=8)
    assert costs.drafting_s(looked_up) == 0
    proposed = replace(looked_up, num_looked_up=0)
    assert costs.seconds(proposed) - costs.seconds(looked_up) == pytest.approx(at(costs.propose, 8))
    before = costs.propose.stored()
    for _ in range(20):
        costs.learn(replace(timed(looked_up, nearly_flat()), draft_s=1e-3))  # spent on looking
    assert costs.propose.stored() == before


SURVIVAL: Floats = np.cumprod(
    np.random.default_rng(0).uniform(0.5, 1, (16, 15)), axis=1, dtype=np.float64
)


def choice(costs: CostModel) -> Ints:
    """Drafts that would be verified of 16 rows."""

    def cost_s(num_drafts: Ints) -> Floats:
        return np.array([costs.seconds(step_work(16, int(count))) for count in num_drafts])

    lengths, _ = best_prefixes(SURVIVAL, 10**6, num_rows=16, cost_s=cost_s)
    return lengths


def rate_of(lengths: Ints, truth: CostModel) -> float:
    """Tokens per second that the choice gives."""
    tokens = 16 + float(usable(SURVIVAL, lengths).sum())
    return tokens / truth.seconds(step_work(16, int(lengths.sum())))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_slower_machine_is_noticed_at_once_and_changes_no_choice(
    machine: Callable[[], CostModel],
) -> None:
    costs, truth = machine(), machine()
    before = choice(costs)
    work = step_work(16, int(before.sum()))
    truth.speed = 2.0
    for _ in range(20):
        costs.learn(timed(work, truth))
    assert costs.speed == pytest.approx(2.0, rel=0.1)
    for _ in range(300):
        costs.learn(timed(work, truth))
    assert costs.seconds(work) == pytest.approx(truth.seconds(work), rel=0.01)
    # The table's share of the surprise: steps that were not made look cheaper by no more.
    assert costs.verify.seconds / machine().verify.seconds == pytest.approx(1.0, abs=0.08)
    assert choice(costs).sum() == pytest.approx(before.sum(), rel=0.15)
    assert rate_of(choice(costs), truth) > 0.99 * rate_of(before, truth)


@pytest.mark.parametrize("machine", MACHINES)
def test_one_disturbed_step_changes_little(machine: Callable[[], CostModel]) -> None:
    costs, truth = machine(), machine()
    before = choice(costs)
    work = step_work(16, int(before.sum()))
    once = timed(work, truth)
    costs.learn(replace(once, verify_s=100 * once.verify_s, draft_s=100 * once.draft_s))
    assert costs.seconds(work) == pytest.approx(truth.seconds(work), rel=0.35)
    for _ in range(30):
        costs.learn(once)
    assert costs.seconds(work) == pytest.approx(truth.seconds(work), rel=0.02)
    assert costs.verify.seconds / machine().verify.seconds == pytest.approx(1.0, abs=0.05)
    assert rate_of(choice(costs), truth) > 0.99 * rate_of(before, truth)


def test_the_model_finds_the_machine_from_steps_of_all_sizes() -> None:
    """The parts have one clock for drafting; what a step costs is right all the same."""
    rng, costs, truth = np.random.default_rng(1), nearly_flat(), bending()
    for _ in range(2500):
        num_rows = int(rng.choice([1, 4, 16, 64]))
        num_drafts = int(rng.integers(0, 8)) * num_rows
        costs.learn(timed(step_work(num_rows, num_drafts), truth))
    for num_rows in (1, 4, 16, 64):
        for per_row in (0, 2, 7):
            work = step_work(num_rows, per_row * num_rows)
            assert costs.seconds(work) == pytest.approx(truth.seconds(work), rel=0.15)


def test_steps_without_time_do_not_break_it() -> None:
    """A clock may stand still."""
    costs = nearly_flat()
    for _ in range(100):
        costs.learn(step_work(4, 8))
    assert costs.speed > 0
    assert math.isfinite(costs.seconds(step_work(4, 8)))
    for _ in range(1500):
        costs.learn(timed(step_work(4, 8), nearly_flat()))
    assert costs.seconds(step_work(4, 8)) == pytest.approx(
        nearly_flat().seconds(step_work(4, 8)), rel=0.05
    )


# --- files


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "costs.json"
    costs = bending()
    for num_drafts in range(1, 40):
        costs.learn(timed(step_work(8, num_drafts), nearly_flat()))
    costs.verify.per_context_unit = 0.25
    costs.save(path, "key")
    found = load_costs(path, "key")
    assert found is not None
    assert [getattr(found, name).stored() for name in CURVES] == [
        getattr(costs, name).stored() for name in CURVES
    ]
    assert found.speed == costs.speed
    assert [each.name for each in path.parent.iterdir()] == ["costs.json"]


def test_costs_of_something_else_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    nearly_flat().save(path, "one machine")
    assert load_costs(path, "another machine") is None
    assert load_costs(tmp_path / "missing.json", "one machine") is None
    assert load_costs(tmp_path, "one machine") is None


def saved(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    path = tmp_path / "costs.json"
    nearly_flat().save(path, "key")
    return path, json.loads(path.read_text())


HOSTILE_VALUES: list[object] = [
    *(None, True, "", "nan", "x", [], {}, -1, -0.5, 0, 10**400),
    *(float("nan"), float("inf"), float("-inf")),
]
HOSTILE_LISTS: list[object] = [
    *([value] for value in HOSTILE_VALUES),
    [1e-3],
    [[1], [2]],
    [2, 1],
    [1, 1],
    list(range(len(GRID))),
]


@pytest.mark.parametrize("field", ["rows", "seconds", "per_context_unit"])
@pytest.mark.parametrize("name", CURVES)
def test_a_hostile_curve_gives_none_or_a_model_that_works(
    tmp_path: Path, name: str, field: str
) -> None:
    path, content = saved(tmp_path)
    for value in [*HOSTILE_VALUES, *HOSTILE_LISTS]:
        curve = content[name]
        assert isinstance(curve, dict)
        path.write_text(json.dumps(content | {name: curve | {field: value}}))
        assert_useless_or_sound(path)
    for value in HOSTILE_VALUES:
        path.write_text(json.dumps(content | {name: value}))
        assert load_costs(path, "key") is None


@pytest.mark.parametrize("field", ["format", "key", "speed", *CURVES])
def test_a_hostile_field_gives_none_or_a_model_that_works(tmp_path: Path, field: str) -> None:
    path, content = saved(tmp_path)
    for value in HOSTILE_VALUES:
        path.write_text(json.dumps(content | {field: value}))
        assert_useless_or_sound(path)
    del content[field]
    path.write_text(json.dumps(content))
    assert load_costs(path, "key") is None


def assert_useless_or_sound(path: Path) -> None:
    """What is read works, and comes to know the machine."""
    found = load_costs(path, "key")
    if found is None:
        return
    work = timed(step_work(8, 24), nearly_flat())
    assert found.speed > 0
    assert 0 < found.seconds(work) < math.inf
    found.learn(work)
    assert 0 < found.seconds(work) < math.inf
    assert all((getattr(found, name).seconds > 0).all() for name in CURVES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", [float("nan")] * len(GRID)),
        ("seconds", [-1e-3] * len(GRID)),
        ("seconds", [0.0] * len(GRID)),
        ("seconds", [1e-3] * (len(GRID) - 1) + [float("inf")]),
        ("seconds", []),
        ("rows", []),
        ("rows", [0, *GRID[1:]]),
        ("rows", [-5, *GRID[1:]]),
        ("rows", [*GRID[:-1], float("inf")]),
        ("per_context_unit", float("nan")),
        ("per_context_unit", -1.0),
    ],
)
def test_costs_that_cannot_be_are_not_read(tmp_path: Path, field: str, value: object) -> None:
    path, content = saved(tmp_path)
    curve = content["verify"]
    assert isinstance(curve, dict)
    path.write_text(json.dumps(content | {"verify": curve | {field: value}}))
    assert load_costs(path, "key") is None


@pytest.mark.parametrize("speed", [0, -1.0, float("nan"), float("inf"), None, "fast"])
def test_a_speed_that_cannot_be_is_not_read(tmp_path: Path, speed: object) -> None:
    path, content = saved(tmp_path)
    path.write_text(json.dumps(content | {"speed": speed}))
    assert load_costs(path, "key") is None


@settings(max_examples=40)
@given(st.binary(max_size=40))
def test_any_bytes_give_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    assert load_costs(path, "key") is None


def test_torn_and_nested_files_give_none(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    whole = path.read_text()
    for length in range(0, len(whole) - 2, 97):
        path.write_text(whole[:length])
        assert load_costs(path, "key") is None
    path.write_text("[" * 200_000)
    assert load_costs(path, "key") is None


class Measuring:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> CostModel:
        self.times += 1
        return bending()


def test_costs_are_measured_once_and_read_the_second_time(tmp_path: Path) -> None:
    measure = Measuring()
    first = KeptCosts(tmp_path / "costs", "key", measure)
    second = KeptCosts(tmp_path / "costs", "key", measure)
    assert measure.times == 1
    assert second.costs.verify.stored() == first.costs.verify.stored()
    KeptCosts(tmp_path / "costs", "other key", measure)
    assert measure.times == 2
    KeptCosts(tmp_path / "costs", "key", measure)
    assert measure.times == 2


def test_a_broken_file_is_measured_again_and_mended(tmp_path: Path) -> None:
    measure = Measuring()
    KeptCosts(tmp_path, "key", measure)
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    KeptCosts(tmp_path, "key", measure)
    KeptCosts(tmp_path, "key", measure)
    assert measure.times == 2


@pytest.mark.parametrize("is_folder_a_file", [True, False])
def test_a_folder_that_cannot_be_written_only_costs_the_measurement(
    tmp_path: Path, is_folder_a_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, measure = tmp_path / "costs", Measuring()
    if is_folder_a_file:
        folder.write_text("in the way")
    else:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("read-only")

        monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(cost_file, "SAVE_EVERY_S", 0.0)
    kept = KeptCosts(folder, "key", measure)
    kept.save_if_due()
    KeptCosts(folder, "key", measure)
    assert measure.times == 2
    assert kept.costs.verify.stored() == bending().verify.stored()


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_file, "SAVE_EVERY_S", 0.0)
    measure = Measuring()
    KeptCosts(None, "key", measure).save_if_due()
    KeptCosts(None, "key", measure)
    assert measure.times == 2


@pytest.mark.parametrize(("every_s", "is_saved"), [(0.0, True), (3600.0, False)])
def test_what_is_learnt_is_saved_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, is_saved: bool
) -> None:
    monkeypatch.setattr(cost_file, "SAVE_EVERY_S", every_s)
    kept = KeptCosts(tmp_path, "key", Measuring())
    kept.costs.speed = 1.5
    kept.save_if_due()
    found = KeptCosts(tmp_path, "key", Measuring()).costs
    assert (found.speed == 1.5) == is_saved
