"""The drafter's context lies in the target's pages: hits, preemption and other widths keep it.

The drafter is real and random. With the target and the drafter both held to two tokens, about half
of its drafts are right, and which ones depends on the context it has seen.
"""

from pathlib import Path

import pytest

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import TokenDelta
from adaflash.engine.types import Request, SamplingParams
from tests.engine.scripted import RealEngine, RealSize, RecordingDrafter, Speculating, real_engine
from tests.engine.toy import request, run, text

COIN = {20: 100.0, 21: 100.0}
Proposals = dict[tuple[str, int, int], tuple[int, ...]]


def engine(model: Path, drafter: Path, length: int, size: RealSize | None = None) -> RealEngine:
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=length)
    return real_engine(model, size, Speculating(drafter, config))


def coin(name: str, prompt: list[int], seed: int, max_tokens: int = 40) -> Request:
    sampling = SamplingParams(
        seed=seed, max_tokens=max_tokens, temperature=4.0, logit_bias=COIN, ignore_eos=True
    )
    return request(name, prompt, sampling)


def outcome(deltas: list[TokenDelta]) -> list[tuple[int | None, int]]:
    return [(delta.num_drafts, delta.num_accepted) for delta in deltas]


def proposals(under_test: RealEngine) -> Proposals:
    assert isinstance(under_test.drafter, RecordingDrafter)
    return under_test.drafter.proposals


def share_accepted(deltas: list[TokenDelta]) -> float:
    blocks = [delta for delta in deltas if delta.num_drafts]
    return sum(delta.num_accepted > 0 for delta in blocks) / len(blocks)


def test_acceptance_after_a_prefix_hit_is_that_of_a_cold_start(model: Path, drafter: Path) -> None:
    under_test = engine(model, drafter, 7)
    prompt = list(range(50, 90))
    cold = run(under_test.engine, [coin("cold", prompt, seed=1)])["cold"]
    warm = run(under_test.engine, [coin("warm", prompt, seed=1)])["warm"]
    assert warm[0].num_cached_tokens == 36
    assert outcome(warm) == outcome(cold)
    assert 0.2 < share_accepted(cold) < 0.95
    known = proposals(under_test)
    for (name, anchor, width), drafts in known.items():
        if name == "warm":
            assert drafts == known["cold", anchor, width]


def test_proposals_after_preemption_are_those_without(model: Path, drafter: Path) -> None:
    asked = [coin(f"r{n}", list(range(n, n + 20)), seed=n) for n in range(4)]
    roomy = engine(model, drafter, 7)
    for item in asked:
        run(roomy.engine, [item])
    tight = engine(model, drafter, 7, RealSize(num_pages=36, prefix_cache=False))
    for item in asked:
        tight.engine.add(item)
    preempted = 0
    while tight.engine.has_work:
        preempted += tight.engine.step().stats.num_preempted
    assert preempted > 0
    assert_alike(proposals(tight), proposals(roomy))


@pytest.mark.parametrize("before", [1, 3, 7])
def test_a_block_is_the_same_whatever_was_verified_before(
    model: Path, drafter: Path, before: int
) -> None:
    """Every block, drafted again by an engine that has only read the text before it."""
    asked = coin("a", list(range(60, 85)), seed=3)
    under_test = engine(model, drafter, before)
    known = asked.prompt_ids + text(run(under_test.engine, [asked])["a"])
    drafted = proposals(under_test)
    assert len(drafted) > 5
    for (_, anchor, width), drafts in drafted.items():
        fresh = engine(model, drafter, before, RealSize(tokens=100))
        run(fresh.engine, [coin("a", known[:anchor], seed=3, max_tokens=9)])
        assert proposals(fresh)["a", anchor, width] == drafts


def assert_alike(some: Proposals, others: Proposals) -> None:
    common = some.keys() & others.keys()
    assert len(common) > 20
    assert {key: some[key] for key in common} == {key: others[key] for key in common}
