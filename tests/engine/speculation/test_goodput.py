"""The goodput policy in the whole engine: it gives up a bad drafter, and keeps an oracle."""

from pathlib import Path

import numpy as np
import pytest

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import StepStats
from adaflash.engine.speculation.costs import CostCurve, CostModel
from adaflash.engine.types import Request, SamplingParams
from tests.engine.scripted import (
    BLOCK_SIZE,
    RealEngine,
    RealSize,
    ScriptedDrafter,
    Speculating,
    oracle,
    real_engine,
)
from tests.engine.toy import request, run, text
from tests.tiny_drafter import write_tiny_drafter

GOODPUT = SpeculationConfig(policy=Policy.GOODPUT)
ROOMY = RealSize(num_pages=2000, seqs=16, tokens=256)


def laptop() -> CostModel:
    """The default model on two cores, as measured once (docs/LOG.md)."""
    return CostModel(
        denoise=CostCurve([1, 8, 32, 128], [0.005, 0.006, 0.008, 0.024]),
        propose=CostCurve([1, 32, 128], [0.0015, 0.0025, 0.005]),
        verify=CostCurve([1, 8, 32, 64, 128, 256], [0.029, 0.032, 0.041, 0.050, 0.075, 0.113]),
        choose=CostCurve([1, 32, 128], [0.0001, 0.0014, 0.006]),
    )


def requests(count: int, max_tokens: int) -> list[Request]:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [request(f"r{n}", list(range(n, n + 12)), sampling) for n in range(count)]


def steps_of(under_test: RealEngine, asked: list[Request]) -> list[StepStats]:
    for item in asked:
        under_test.engine.add(item)
    stats = []
    while under_test.engine.has_work:
        stats.append(under_test.engine.step().stats)
    return stats


def target_cost(under_test: RealEngine) -> float:
    """Seconds of all target passes, by the model that does not learn."""
    return float(laptop().verify.at(np.array(under_test.target.tokens_of_passes)).sum())


@pytest.mark.parametrize("num_requests", [1, 12])
def test_a_random_drafter_is_given_up(model: Path, tmp_path: Path, num_requests: int) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    asked = requests(num_requests, max_tokens=300)
    plain = real_engine(model, ROOMY)
    steps_of(plain, asked)
    under_test = real_engine(model, ROOMY, Speculating(folder, GOODPUT, laptop()))
    stats = steps_of(under_test, asked)
    speculation = [step.speculation for step in stats if step.speculation is not None]
    drafting = [n for n, s in enumerate(speculation) if s.width > 0]
    assert drafting, "it was never tried"
    assert all(s.is_probe for s in speculation[50:] if s.width > 0)
    assert not speculation[-1].is_paying
    assert target_cost(under_test) <= 1.05 * target_cost(plain)


def test_an_oracle_is_kept(model: Path) -> None:
    asked = requests(4, max_tokens=120)
    plain = real_engine(model, ROOMY)
    texts = {r.request_id: r.prompt_ids + text(run(plain.engine, [r])[r.request_id]) for r in asked}
    drafter = ScriptedDrafter(texts, oracle, confidence=0.5)
    under_test = real_engine(model, ROOMY, Speculating(drafter, GOODPUT, laptop()))
    stats = steps_of(under_test, asked)
    # A whole block each time, but for the ends.
    assert len(stats) <= 120 / BLOCK_SIZE + 4
    assert all(s.speculation.is_paying for s in stats if s.speculation is not None)
