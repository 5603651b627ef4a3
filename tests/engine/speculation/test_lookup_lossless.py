"""Drafts from known text change no token, on real K/V in float32, and save the passes they should.

The texts repeat themselves: the tiny target runs into circles, or is held to two tokens, of which
guesses are right about every second time.
"""

from collections.abc import Sequence as Many
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import DraftedBy, TokenDelta
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.policies import drafting_budget
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import Verified
from adaflash.engine.types import Request, SamplingParams
from tests.engine.scripted import (
    BLOCK_SIZE,
    RealSize,
    ScriptedDrafter,
    Speculating,
    cheap_costs,
    half_right,
    real_engine,
)
from tests.engine.speculation.test_lossless import config_of
from tests.engine.speculation.test_lossless import requests as varied_requests
from tests.engine.toy import VOCAB as TOY_VOCAB
from tests.engine.toy import ToySize, ToyTarget, request, run, text, toy_engine

POLICIES = ["fixed:1", "fixed:4", "fixed:7", "threshold", "goodput"]
DRAFTERS = ["none", "real", "half-right"]
TIGHT = RealSize(num_pages=26)  # too few for all requests at once: some are preempted
COIN = {20: 100.0, 21: 100.0}
SLOTS = BLOCK_SIZE - 1  # that each row has


def repetitive_requests() -> list[Request]:
    """Prompts that repeat themselves; greedy and sampled, free and held to two tokens."""
    cycle = [*range(100, 109)] * 3
    parameters: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logit_bias": COIN},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 4.0, "logit_bias": COIN, "frequency_penalty": 0.1},
        {"temperature": 0.7, "top_k": 2},
        {"temperature": 0.0, "repetition_penalty": 0.7, "min_tokens": 9},
    ]
    return [
        request(
            f"c{number}",
            [number, *cycle[: 12 + 3 * number]],
            SamplingParams(seed=number, max_tokens=24, ignore_eos=number < 5, **given),  # type: ignore[arg-type]
        )
        for number, given in enumerate(parameters)
    ]


def requests() -> list[Request]:
    return [*varied_requests(), *repetitive_requests()]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    """What plain decoding writes, each request alone."""
    engine = real_engine(model).engine
    return {item.request_id: text(run(engine, [item])[item.request_id]) for item in requests()}


def renamed(asked: list[Request], suffix: str) -> list[Request]:
    return [request(f"{r.request_id}{suffix}", r.prompt_ids, r.sampling) for r in asked]


@pytest.mark.parametrize("store_tokens", [0, 1000])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_known_text_changes_no_token(
    model: Path,
    drafter: Path,
    plain: dict[str, list[int]],
    kind: str,
    policy: str,
    store_tokens: int,
) -> None:
    """Twice the same requests, with chunks, prefix hits, preemption and a neighbour aborted."""
    texts = {r.request_id: r.prompt_ids + plain[r.request_id] for r in requests()}
    texts |= {f"{name}again": known for name, known in texts.items()} | {"gone": [1] * 200}
    source = {
        "none": None,
        "real": drafter,
        "half-right": ScriptedDrafter(texts, half_right, 0.6),
    }[kind]
    lookup = Lookup(5, store_tokens)
    speculating = Speculating(source, config_of(policy), lookup=lookup)
    under_test = real_engine(model, TIGHT, speculating)
    engine = under_test.engine
    engine.add(request("gone", [1] * 30, SamplingParams(seed=9, max_tokens=90, ignore_eos=True)))
    deltas: list[TokenDelta] = []
    num_preempted = step = 0
    for asked in (requests(), renamed(requests(), "again")):
        for item in asked:
            engine.add(item)
        while engine.has_work:
            if step == 8:
                engine.abort("gone")
            report = engine.step()
            engine.check_integrity()
            step += 1
            num_preempted += report.stats.num_preempted
            deltas += report.deltas
    written = {name: text([d for d in deltas if d.request_id == name]) for name in texts}
    for name, expected in plain.items():
        assert written[name] == expected
        assert written[f"{name}again"] == expected
    assert num_preempted > 0
    assert under_test.pool.num_held == 0
    assert len(lookup._readers) == 0
    check_sources(deltas, has_drafter=source is not None)


def check_sources(deltas: list[TokenDelta], *, has_drafter: bool) -> None:
    for delta in deltas:
        assert (delta.drafted_by is not None) == bool(delta.num_drafts)
        if delta.drafted_by is DraftedBy.LOOKUP:
            assert delta.num_drafts is not None
            assert delta.num_drafts <= 5
    by = {source: [d for d in deltas if d.drafted_by is source] for source in DraftedBy}
    assert sum(delta.num_accepted for delta in by[DraftedBy.LOOKUP]) > 0
    assert bool(by[DraftedBy.DRAFTER]) == has_drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["fixed:7", "goodput"])
def test_a_text_that_is_known_takes_one_pass_for_eight_tokens(
    model: Path, temperature: float, policy: str
) -> None:
    """The second time, once so much of it stands there that it is recognised with some trust."""
    sampling = SamplingParams(seed=5, max_tokens=51, temperature=temperature, ignore_eos=True)
    asked = request("a", [3, 1, 4], sampling)
    plain = text(run(real_engine(model).engine, [asked])["a"])
    source = Lookup(SLOTS, 1000)
    under_test = real_engine(model, None, Speculating(None, config_of(policy), lookup=source))
    (first,) = run(under_test.engine, [asked]).values()
    under_test.target.tokens_of_passes.clear()
    (second,) = run(under_test.engine, renamed([asked], "again")).values()
    assert text(first) == text(second) == plain
    passes = under_test.target.tokens_of_passes
    num_plain = 8 if policy == "fixed:7" else 2  # until the chance is above the floor
    assert len(passes) <= num_plain + (51 - num_plain) / (SLOTS + 1) + 3
    accepted = sum(delta.num_accepted for delta in second)
    drafted = sum(delta.num_drafts or 0 for delta in second)
    assert accepted > 0.7 * drafted


class CopyingTarget(ToyTarget):
    """Its text is what stood 9 tokens before."""

    def verify(self, rows: Many[VerifyRow]) -> Verified:
        self.tokens_of_passes.append(sum(row.num_tokens for row in rows))
        texts = [
            [*row.row.sequence.token_ids, *row.drafts[:count]]
            for row in rows
            for count in range(row.num_logits)
        ]
        wanted = torch.tensor([text[-9] for text in texts], dtype=torch.int64)
        empty = torch.empty(0)
        return Verified(10.0 * one_hot(wanted, TOY_VOCAB), empty, empty, empty)


@pytest.mark.parametrize("policy", ["fixed:7", "threshold", "goodput"])
def test_copied_text_takes_as_few_passes_as_drafts_allow(policy: str) -> None:
    limits = ModelLimits(TOY_VOCAB, frozenset({0}), max_model_len=200)
    target = CopyingTarget()
    engine = toy_engine(
        ToySize(num_pages=64, max_model_len=200, tokens=32, draft_slots=SLOTS),
        target=target,
        budget=drafting_budget(config_of(policy), (), limits, cheap_costs()),
        lookup=Lookup(SLOTS, 0),
    )
    prompt = [*range(1, 10)] * 2
    sampling = SamplingParams(seed=0, max_tokens=65, temperature=0.0)
    deltas = run(engine, [request("a", prompt, sampling)])["a"]
    assert text(deltas) == ([*range(1, 10)] * 8)[:65]
    # The prompt brings the first token; 64 more are eight runs of seven drafts and one more.
    passes = [18, *[8] * 8]
    if policy == "threshold":  # its rate makes it a token shorter now and then
        assert len(target.tokens_of_passes) <= len(passes) + 2
    else:
        assert target.tokens_of_passes == passes
        assert [d.num_accepted for d in deltas] == [0, *[7] * 8]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_no_guess_goes_beyond_what_the_request_may_still_get(
    model: Path, policy: str, max_tokens: int
) -> None:
    sampling = SamplingParams(seed=5, max_tokens=40, temperature=0.0, ignore_eos=True)
    source = Lookup(SLOTS, 1000)
    under_test = real_engine(model, None, Speculating(None, config_of(policy), lookup=source))
    longer = text(run(under_test.engine, [request("a", [3, 1, 4], sampling)])["a"])
    short = SamplingParams(seed=5, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    under_test.target.tokens_of_passes.clear()
    deltas = run(under_test.engine, [request("b", [3, 1, 4], short)])["b"]
    assert text(deltas) == longer[:max_tokens]
    emitted = 1
    for delta in deltas[1:]:
        assert (delta.num_drafts or 0) <= max_tokens - emitted - 1
        emitted += len(delta.token_ids)


def test_a_reply_that_was_aborted_is_known_too(model: Path) -> None:
    """A stop string ends a request so."""
    sampling = SamplingParams(seed=5, max_tokens=40, temperature=1.0, ignore_eos=True)
    source = Lookup(SLOTS, 1000)
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=7)
    engine = real_engine(model, None, Speculating(None, config, lookup=source)).engine
    engine.add(request("a", [3, 1, 4], sampling))
    for _ in range(20):
        engine.step()
    engine.abort("a")
    engine.step()
    deltas = run(engine, [request("b", [3, 1, 4], sampling)])["b"]
    assert sum(delta.num_accepted for delta in deltas) > 10


def test_off_looks_nothing_up(model: Path) -> None:
    source = Lookup(SLOTS, 1000)
    config = SpeculationConfig(policy=Policy.OFF)
    engine = real_engine(model, None, Speculating(None, config, lookup=source)).engine
    deltas = run(engine, repetitive_requests())
    assert all(not delta.num_drafts for own in deltas.values() for delta in own)
