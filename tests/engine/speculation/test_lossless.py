"""Speculation changes no token: every drafter, policy and length, on real K/V in float32."""

from pathlib import Path

import msgspec
import pytest

from adaflash.engine.config import Policy, SpeculationConfig, parse_policy
from adaflash.engine.engine import Engine
from adaflash.engine.messages import TokenDelta
from adaflash.engine.types import Request, SamplingParams
from tests.engine.scripted import (
    BLOCK_SIZE,
    RealSize,
    Script,
    ScriptedDrafter,
    Speculating,
    half_right,
    oracle,
    real_engine,
)
from tests.engine.toy import request, run, text

POLICIES = [*(f"fixed:{length}" for length in range(1, BLOCK_SIZE)), "threshold", "goodput"]
SCRIPTS: dict[str, tuple[Script, float]] = {
    "oracle": (oracle, 0.95),
    "half-right": (half_right, 0.6),
    "always wrong": (lambda request_id, position: False, 0.5),
}
TIGHT = RealSize(num_pages=26)  # too few for all requests at once: some are preempted


def requests() -> list[Request]:
    """Greedy and sampled, with every parameter; half of them share their first 18 tokens."""
    shared = list(range(100, 118))
    parameters: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 2.0, 9: -100.0}},
        {"temperature": 1.0, "top_k": 40, "min_tokens": 6},
        {"temperature": 0.7, "logit_bias": {5: 3.0}, "frequency_penalty": 1.0},
    ]
    return [
        request(
            f"r{number}",
            (shared if number % 2 else []) + list(range(number, 9 * number + 7)),
            SamplingParams(seed=number, max_tokens=22, ignore_eos=number < 4, **given),  # type: ignore[arg-type]
        )
        for number, given in enumerate(parameters)
    ]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    """What plain decoding writes, each request alone."""
    engine = real_engine(model).engine
    return {item.request_id: text(run(engine, [item])[item.request_id]) for item in requests()}


def known(plain: dict[str, list[int]]) -> dict[str, list[int]]:
    return {item.request_id: item.prompt_ids + plain[item.request_id] for item in requests()}


def config_of(policy: str) -> SpeculationConfig:
    kind, length = parse_policy(policy)
    return SpeculationConfig(
        policy=kind, fixed_length=length, probe_every=5, full_width_every=7, threshold_ema=0.7
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_drafter_and_policy_writes_what_plain_decoding_writes(
    model: Path, plain: dict[str, list[int]], name: str, policy: str
) -> None:
    """With chunked prefill, prefix hits, preemption, and a neighbour that is aborted."""
    script, confidence = SCRIPTS[name]
    drafter = ScriptedDrafter(known(plain) | {"gone": [1] * 200}, script, confidence)
    assert served(model, Speculating(drafter, config_of(policy))) == plain
    assert drafter.widths, "nothing was drafted"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_drafter_changes_no_token(
    model: Path, drafter: Path, plain: dict[str, list[int]], policy: str
) -> None:
    assert served(model, Speculating(drafter, config_of(policy))) == plain


def served(model: Path, speculating: Speculating) -> dict[str, list[int]]:
    """The texts of all requests, in a hurly-burly."""
    under_test = real_engine(model, TIGHT, speculating)
    engine = under_test.engine
    engine.add(request("gone", [1] * 30, SamplingParams(seed=9, max_tokens=90, ignore_eos=True)))
    written, num_preempted = serve(engine, requests(), abort_at=8)
    assert num_preempted > 0
    assert under_test.pool.num_held == 0
    return written


def serve(
    engine: Engine, asked: list[Request], *, abort_at: int | None = None
) -> tuple[dict[str, list[int]], int]:
    """All requests at once, "gone" aborted at a step; texts, and how many were preempted."""
    for item in asked:
        engine.add(item)
    written: dict[str, list[int]] = {item.request_id: [] for item in asked}
    num_preempted, step = 0, 0
    while engine.has_work:
        if step == abort_at:
            engine.abort("gone")
        report = engine.step()
        engine.check_integrity()
        step += 1
        num_preempted += report.stats.num_preempted
        for delta in report.deltas:
            if delta.request_id in written:
                written[delta.request_id] += delta.token_ids
    return written, num_preempted


@pytest.mark.parametrize("policy", ["fixed:7", "goodput"])
def test_accepted_runs_carry_the_targets_own_logprobs_and_endings(model: Path, policy: str) -> None:
    """Deltas joined are those of plain decoding, but for rounding in the logprobs.

    The drafter knows how the target would go on behind the end, so that runs are accepted there.
    """
    endless = [
        request(
            f"r{number}",
            [number + 1] * 9,
            SamplingParams(
                seed=number,
                max_tokens=50,
                temperature=number % 2,
                num_logprobs=2,
                presence_penalty=1.5,
                ignore_eos=True,
            ),
        )
        for number in range(6)
    ]
    engine = real_engine(model).engine
    texts = {r.request_id: r.prompt_ids + text(run(engine, [r])[r.request_id]) for r in endless}
    asked = [
        request(r.request_id, r.prompt_ids, ended(r.sampling, texts[r.request_id][-25]))
        for r in endless
    ]
    plain = run(engine, asked)
    drafter = ScriptedDrafter(texts, oracle, 0.95)
    speculating = Speculating(drafter, config_of(policy))
    speculative = run(real_engine(model, speculating=speculating).engine, asked)
    for name, deltas in plain.items():
        compare(deltas, speculative[name])
    reasons = {deltas[-1].finish_reason for deltas in plain.values()}
    assert len(reasons) == 2, "both endings ought to occur"
    assert any(delta.num_accepted for deltas in speculative.values() for delta in deltas)


def ended(sampling: SamplingParams, stop: int) -> SamplingParams:
    """By a stop token, or by max_tokens for every third."""
    changes = (
        {"max_tokens": 11} if sampling.seed % 3 == 0 else {"stop_token_ids": frozenset({stop})}
    )
    return msgspec.structs.replace(sampling, **changes)


def compare(plain: list[TokenDelta], speculative: list[TokenDelta]) -> None:
    assert text(plain) == text(speculative)
    assert plain[-1].finish_reason == speculative[-1].finish_reason
    assert plain[-1].stop_token_id == speculative[-1].stop_token_id
    for delta in speculative:
        assert 0 <= delta.num_accepted <= min(delta.num_drafts or 0, len(delta.token_ids))
    joined = [
        [entry for d in deltas for entry in d.logprobs or []] for deltas in (plain, speculative)
    ]
    for one, other in zip(*joined, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_the_oracle_needs_one_pass_for_eight_tokens(model: Path) -> None:
    asked = request("a", [3, 1, 4], SamplingParams(seed=0, max_tokens=41, ignore_eos=True))
    plain = text(run(real_engine(model).engine, [asked])["a"])
    drafter = ScriptedDrafter({"a": asked.prompt_ids + plain}, oracle, 0.99)
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=7)
    under_test = real_engine(model, speculating=Speculating(drafter, config))
    deltas = run(under_test.engine, [asked])["a"]
    assert text(deltas) == plain
    # The prompt brings the first token; 40 more are five runs of seven drafts and one more token.
    assert under_test.target.tokens_of_passes == [3, 8, 8, 8, 8, 8]
    assert [(d.num_drafts, d.num_accepted) for d in deltas] == [(None, 0), *[(7, 7)] * 5]


def test_no_draft_goes_beyond_what_the_request_may_still_get(model: Path) -> None:
    asked = request("a", [3, 1, 4], SamplingParams(seed=0, max_tokens=6, ignore_eos=True))
    plain = text(run(real_engine(model).engine, [asked])["a"])
    drafter = ScriptedDrafter({"a": asked.prompt_ids + plain}, oracle, 0.99)
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=7)
    under_test = real_engine(model, speculating=Speculating(drafter, config))
    assert text(run(under_test.engine, [asked])["a"]) == plain
    assert under_test.target.tokens_of_passes == [3, 5]
