"""Measures what the parts of a step cost on this machine, before the first request."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.pages import PagePool
from adaflash.engine.sampler import ChoiceRow
from adaflash.engine.speculation.costs import CONTEXT_UNIT, CostCurve, CostModel
from adaflash.engine.speculation.step import Block, Chooser, DraftSource, Target
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence

COARSE = (1, 8, 32, 128, 512, 2048)  # rows that are always measured
FINE = (4, 16, 64, 256, 1024, 2, 12, 24, 48, 96, 192, 384, 768, 1536)  # while there is time
FINE_S = 0.5  # seconds for the fine ones of each curve; serving fills in the rest
SWEEPS = 2  # the quicker one counts
CONTEXT = 16  # tokens before the measured ones
LONG = 1024  # tokens before them when the price of context is measured, if the cache has room
MANY = 8  # sequences for that


@dataclass(frozen=True)
class MeasureLimits:
    """How large the steps of this engine can get."""

    max_num_seqs: int
    max_batched_tokens: int
    block_size: int  # tokens of a row with its drafts
    vocab_size: int


@dataclass(frozen=True)
class Measured:
    """The real parts of a step, and an idle pool."""

    target: Target
    chooser: Chooser
    drafter: DraftSource | None
    pool: PagePool


def measure_costs(parts: Measured, limits: MeasureLimits) -> CostModel:
    """Run every part that there is at several sizes."""
    bench = _Bench(parts, limits)
    if not bench.has_pages(1):  # a pool of a few tokens; serving will have to tell
        denoise, propose, verify, choose = (CostCurve([1], [1e-3]) for _ in range(4))
        return CostModel(denoise, propose, verify, choose)
    denoise, propose = CostCurve([1], [1e-9]), CostCurve([1], [1e-9])  # never run
    if parts.drafter is not None:
        drafter = _DrafterBench(parts, limits, parts.drafter)
        denoise = drafter.attending_curve(drafter.denoise, limits.block_size * limits.max_num_seqs)
        propose = drafter.plain_curve(drafter.propose)
    return CostModel(
        denoise=denoise,
        propose=propose,
        verify=bench.attending_curve(bench.verify, limits.max_batched_tokens),
        choose=bench.plain_curve(bench.choose),
    )


class _Pass(Protocol):
    """One kind of pass over `count` sequences with `context` tokens each. Returns seconds."""

    def __call__(self, rows: int, context: int, count: int | None = None) -> float: ...


class _Bench:
    """Synthetic rows through the real parts."""

    def __init__(self, parts: Measured, limits: MeasureLimits) -> None:
        self._target = parts.target
        self._chooser = parts.chooser
        self._pool = parts.pool
        self._limits = limits

    def attending_curve(self, run: _Pass, most: int) -> CostCurve:
        """Seconds by rows at a short context, and what context adds."""
        while not self.has_pages(most):
            most //= 2
        run(most, CONTEXT)  # to warm up
        price = self._context_price(run)
        return _curve(lambda rows: run(rows, CONTEXT), most, price * CONTEXT_UNIT)

    def plain_curve(self, run: Callable[[int], float]) -> CostCurve:
        return _curve(run, self._limits.max_batched_tokens)

    def verify(self, rows: int, context: int, count: int | None = None) -> float:
        """The target's pass over `rows` tokens."""
        count = count or 1
        with self._sequences(count, context, rows // count) as sequences:
            drafts = (0,) * (rows // count - 1)
            plan = [VerifyRow(_row(sequence), drafts) for sequence in sequences]
            return _timed(lambda: self._target.verify(plan))

    def choose(self, rows: int) -> float:
        """The target's choices from `rows` rows of logits."""
        logits = torch.zeros(rows, self._limits.vocab_size)
        row = ChoiceRow(_sequence(1, []))
        return _timed(lambda: self._chooser.choose(logits, [row] * rows))

    def has_pages(self, rows: int) -> bool:
        """Whether any kind of pass over `rows` rows fits into the pool."""
        block_size = self._limits.block_size
        blocks = -(-rows // block_size) * self._pool.pages_for(CONTEXT + block_size)
        return max(blocks, self._pool.pages_for(CONTEXT + rows)) <= self._pool.num_available

    def _context_price(self, run: _Pass) -> float:
        """Seconds per token of context, from a few long sequences against short ones."""
        count = min(MANY, self._limits.max_num_seqs)
        long = self._pool.num_available // count * self._pool.page_size
        long = min(LONG, long) - self._limits.block_size
        if long <= 2 * CONTEXT:
            return 0.0
        difference = run(count, long, count) - run(count, CONTEXT, count)
        return max(0.0, difference / (count * (long - CONTEXT)))

    @contextmanager
    def _sequences(self, count: int, context: int, rows: int) -> Iterator[list[Sequence]]:
        """Sequences with `context` tokens in the cache and slots for `rows` more."""
        each = self._pool.pages_for(context + rows)
        pages = self._pool.allocate(count * each)
        try:
            yield [_sequence(context, pages[n * each : (n + 1) * each]) for n in range(count)]
        finally:
            self._pool.release(pages)


class _DrafterBench(_Bench):
    """The parts of a step that only a drafter has."""

    def __init__(self, parts: Measured, limits: MeasureLimits, drafter: DraftSource) -> None:
        super().__init__(parts, limits)
        self._source = drafter

    def denoise(self, rows: int, context: int, count: int | None = None) -> float:
        """The drafter's pass over `rows` rows in blocks, and the length head.

        The context of a token for each block, which it writes first, is part of it.
        """
        width = min(max(rows, 2), self._limits.block_size)
        with self._sequences(count or -(-rows // width), context, width) as sequences:
            plan = [_row(sequence) for sequence in sequences]
            self._source.observe(self._target.verify([VerifyRow(row) for row in plan]))
            return _timed(lambda: self._source.estimate(self._source.denoise(plan, width)))

    def propose(self, num_drafts: int) -> float:
        """The draft LM head and the choice of `num_drafts` tokens."""
        most = self._limits.block_size - 1
        count = -(-num_drafts // most)
        lengths = [min(most, num_drafts - most * index) for index in range(count)]
        with self._sequences(1, CONTEXT, self._limits.block_size) as (sequence,):
            one = self._source.denoise([_row(sequence)], self._limits.block_size)
            block = Block(one.rows * count, one.hidden.expand(count, -1, -1))
            return _timed(lambda: self._source.propose(block, lengths))


def _curve(run: Callable[[int], float], most: int, per_context_unit: float = 0.0) -> CostCurve:
    """Seconds of `run` by rows, up to `most`."""
    coarse = [*_below(COARSE, most), most]
    # Sweep by sweep, so that a disturbance does not hit all runs of one size; it only adds.
    sweeps = [[run(rows) for rows in coarse] for _ in range(SWEEPS)]
    seconds = dict(zip(coarse, map(min, zip(*sweeps, strict=True)), strict=True))
    deadline = time.perf_counter() + FINE_S
    for rows in _below(FINE, most):
        if time.perf_counter() > deadline:
            break
        seconds[rows] = run(rows)
    grid = sorted(seconds)
    return CostCurve(grid, [seconds[rows] for rows in grid], per_context_unit)


def _below(grid: tuple[int, ...], most: int) -> list[int]:
    return [rows for rows in grid if rows < most]


def _sequence(context: int, pages: list[int]) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=1.0)
    request = Request(request_id="measure", prompt_ids=[0] * (context + 1), sampling=sampling)
    return Sequence(request, order=0, num_committed=context, pages=pages)


def _row(sequence: Sequence) -> Row:
    return Row(sequence, sequence.num_committed, 1, RowKind.VERIFY)


def _timed(run: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
