"""A machine and a drafter whose truth is known, and a budget that plays against them."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.speculation.budget import Budget, Estimate, Order, context_of
from adaflash.engine.speculation.calibration import Floats, Ints
from adaflash.engine.speculation.costs import CostCurve, CostModel, StepWork
from adaflash.engine.speculation.policies import drafting_budget
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence, StepPlan

BLOCK = 16
WIDTHS = (4, 8, 16)
LIMITS = ModelLimits(vocab_size=8, eos_token_ids=frozenset(), max_model_len=100_000)
ROOM = 100_000
GRID = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def decoding_row(
    *, context: int = 32, slots: int = BLOCK - 1, max_tokens: int = 50_000, prompt: int = 8
) -> Row:
    """A row whose newest of `context` tokens is to be computed."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    sequence = Sequence(Request(request_id="a", prompt_ids=[1] * prompt, sampling=sampling), 0)
    sequence.token_ids += [2] * (context - prompt)
    sequence.num_committed = context - 1
    return Row(sequence, context - 1, 1, RowKind.VERIFY, slots)


def decoding_rows(count: int) -> tuple[Row, ...]:
    return tuple(decoding_row() for _ in range(count))


def plan_of(rows: Many[Row], *, room: int = ROOM, num_prefill: int = 0) -> StepPlan:
    """A step with these decoding rows and a prompt's chunk of `num_prefill` tokens."""
    if not num_prefill:
        return StepPlan(tuple(rows), draft_room=room)
    request = Request(
        request_id="p", prompt_ids=[1] * num_prefill, sampling=SamplingParams(seed=0, max_tokens=9)
    )
    chunk = Row(Sequence(request, 0), 0, num_prefill, RowKind.PREFILL)
    return StepPlan((*rows, chunk), draft_room=room)


def curve(price: Callable[[float], float]) -> CostCurve:
    return CostCurve(GRID, [price(rows) for rows in GRID])


def machine(verify: Callable[[float], float], *, denoise_share: float = 0.15) -> CostModel:
    """Costs by the target's price for so many tokens; the drafter has a share of its layers."""
    return CostModel(
        denoise=curve(lambda rows: denoise_share * verify(rows)),
        propose=curve(lambda rows: 1e-4 + 2e-6 * rows),
        verify=curve(verify),
        choose=curve(lambda rows: 1e-4 + 2e-6 * rows),
    )


def nearly_flat() -> CostModel:
    """A large accelerator: the weights' way through memory is nearly all there is."""
    return machine(lambda rows: 10e-3 + 2e-6 * rows)


def bending() -> CostModel:
    """Flat at first, then every token costs: most machines."""
    return machine(lambda rows: 10e-3 + 10e-6 * rows + 100e-6 * max(0.0, rows - 64))


def linear() -> CostModel:
    """Every token costs the same: a small processor."""
    return machine(lambda rows: 1e-3 * rows)


@dataclass(frozen=True)
class Played:
    """What one step did."""

    order: Order
    lengths: Ints  # of the drafted rows
    accepted: Ints
    num_tokens: int  # that were emitted
    seconds: float
    plain_seconds: float  # of the same step without drafts

    @property
    def is_drafting(self) -> bool:
        return self.order.width > 0


@dataclass
class World:
    """`truth(count, width)`: chances of each draft, given those before it, of so many blocks."""

    truth: Callable[[int, int], Floats]
    costs: CostModel
    budget: Budget
    head: Callable[[Floats], Floats] = lambda truth: truth  # the head's opinion of the truth
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    log: list[Played] = field(default_factory=list)

    def step(self, rows: Many[Row], *, room: int = ROOM, num_prefill: int = 0) -> Played:
        plan = plan_of(rows, room=room, num_prefill=num_prefill)
        order = self.budget.order(plan)
        lengths = accepted = np.zeros(0, dtype=np.int64)
        allotment = None
        if order.width:
            truth = self.truth(len(order.rows), order.width)
            conditional = self.head(truth)
            ratio = (1 + np.cumprod(conditional, axis=1).sum(axis=1)) / BLOCK
            allotment = self.budget.allot(order, Estimate(conditional, ratio))
            lengths = allotment.lengths
            right = np.cumprod(self.rng.random(truth.shape) < truth, axis=1).sum(axis=1)
            accepted = np.minimum(right, lengths)
        work = self._work(plan, order, int(lengths.sum()))
        self.budget.learn(order, allotment, accepted.tolist(), work)
        plain = self._work(plan, Order(order.load), 0)
        played = Played(
            order, lengths, accepted, len(rows) + int(accepted.sum()), work.seconds, plain.seconds
        )
        self.log.append(played)
        return played

    def play(self, rows: Many[Row], steps: int) -> list[Played]:
        return [self.step(rows) for _ in range(steps)]

    def _work(self, plan: StepPlan, order: Order, num_drafts: int) -> StepWork:
        counts = StepWork(
            block_rows=len(order.rows) * order.width,
            num_drafts=num_drafts,
            num_tokens=plan.num_tokens + num_drafts,
            num_choices=len(plan.decoding) + num_drafts,
            context_tokens=context_of(plan.rows),
            block_context_tokens=context_of(order.rows),
        )
        return timed(counts, self.costs)


def timed(work: StepWork, truth: CostModel) -> StepWork:
    """The same work with the times that it takes by the true costs."""

    def seconds(part: CostCurve, rows: int, context: int = 0) -> float:
        return truth.speed * float(part.at(np.array([rows]), context)[0])

    return StepWork(
        block_rows=work.block_rows,
        num_drafts=work.num_drafts,
        num_tokens=work.num_tokens,
        num_choices=work.num_choices,
        context_tokens=work.context_tokens,
        block_context_tokens=work.block_context_tokens,
        draft_s=seconds(truth.denoise, work.block_rows, work.block_context_tokens)
        + seconds(truth.propose, work.num_drafts),
        verify_s=seconds(truth.verify, work.num_tokens, work.context_tokens),
        sample_s=seconds(truth.choose, work.num_choices),
    )


def constant(chance: float) -> Callable[[int, int], Floats]:
    """Blocks of which every draft is accepted with the same chance, given those before it."""
    return lambda count, width: np.full((count, width - 1), chance)


def budget_of(
    costs: CostModel, policy: Policy = Policy.GOODPUT, *, length: int | None = None
) -> Budget:
    config = SpeculationConfig(policy=policy, fixed_length=length)
    return drafting_budget(config, WIDTHS, LIMITS, costs)


def world(
    machine_of: Callable[[], CostModel],
    truth: Callable[[int, int], Floats],
    *,
    head: Callable[[Floats], Floats] = lambda truth: truth,
    seed: int = 0,
) -> World:
    """A goodput budget that has measured its machine right."""
    costs = machine_of()
    rng = np.random.default_rng(seed)
    return World(truth, costs, budget_of(machine_of()), head, rng)
