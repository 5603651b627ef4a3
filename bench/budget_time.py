"""How long the verification budget thinks, in ms: medians of many runs, no model.

    python bench/budget_time.py

"guess" looks for known text and takes in what became of it. "allot" is the joint optimum over all
drafted blocks; "order" decides before them whether to draft and how wide; "learn" takes the outcome
in. Blocks of 16, all requests drafted.
"""

import statistics
import time

import numpy as np

from adaflash.engine.config import SpeculationConfig
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.costs import CostCurve, CostModel, StepWork
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.policies import drafting_budget
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence, StepPlan

WIDTHS = (4, 8, 16)
RUNS = 200


def main() -> None:
    print("requests   guess   order   allot   learn")
    for count in (1, 8, 64, 256):
        seconds = (guess_s(count), *times(count))
        print(f"{count:>8}" + "".join(f"{1e3 * s:8.2f}" for s in seconds))


def times(count: int) -> tuple[float, float, float]:
    limits = ModelLimits(1000, frozenset(), 10_000)
    budget = drafting_budget(SpeculationConfig(), WIDTHS, limits, costs())
    plan = StepPlan(tuple(row(number) for number in range(count)), draft_room=4096)
    draw = np.random.default_rng(0)
    orders, allots, learns = list[float](), list[float](), list[float]()
    for _ in range(RUNS):
        clock = time.perf_counter()
        order = budget.order(plan)
        orders.append(time.perf_counter() - clock)
        shape = (len(order.rows), order.width - 1)
        estimate = Estimate(draw.uniform(0.3, 0.95, shape), draw.uniform(0.2, 0.9, shape[0]))
        clock = time.perf_counter()
        allotment = budget.allot(order, estimate)
        allots.append(time.perf_counter() - clock)
        accepted = allotment.lengths.tolist()
        work = StepWork(
            block_rows=len(order.rows) * order.width,
            num_drafts=9,
            num_tokens=9,
            num_choices=9,
            draft_s=0.004,
            verify_s=0.02,
            sample_s=0.001,
        )
        clock = time.perf_counter()
        budget.learn(order, allotment, accepted, work)
        learns.append(time.perf_counter() - clock)
    return statistics.median(orders), statistics.median(allots), statistics.median(learns)


def guess_s(count: int) -> float:
    """A step's part of looking up, for texts over 500 tokens that grow by 2 a step."""
    draw, lookup = np.random.default_rng(0), Lookup(8, 1_000_000)
    rows = [row(number) for number in range(count)]
    known = row(count).sequence
    known.token_ids += draw.integers(0, 500, 100_000).tolist()
    lookup.remember(known)
    seconds = []
    for _ in range(RUNS):
        clock = time.perf_counter()
        lookup.learn(lookup.guess(rows), [[1, 2]] * count)
        seconds.append(time.perf_counter() - clock)
        for each in rows:
            each.sequence.token_ids += draw.integers(0, 500, 2).tolist()
    return statistics.median(seconds)


def row(number: int) -> Row:
    sampling = SamplingParams(seed=0, max_tokens=1000)
    asked = Request(request_id=f"{number}", prompt_ids=[0] * 201, sampling=sampling)
    sequence = Sequence(asked, order=number, num_committed=200)
    return Row(sequence, 200, 1, RowKind.VERIFY, draft_slots=15)


def costs() -> CostModel:
    grid = [1, 32, 256, 4096]
    return CostModel(
        denoise=CostCurve(grid, [0.001, 0.0012, 0.002, 0.01]),
        propose=CostCurve(grid, [0.0005, 0.001, 0.002, 0.01]),
        verify=CostCurve(grid, [0.02, 0.022, 0.03, 0.2]),
        choose=CostCurve(grid, [0.0001, 0.0005, 0.002, 0.02]),
    )


if __name__ == "__main__":
    main()
