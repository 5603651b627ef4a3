"""Speculated text has exactly the target's distribution: an enumerated toy, and 10^5 samples."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence as Many
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.messages import TokenDelta
from adaflash.engine.sampler import ChoiceRow, Sampler
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.policies import drafting_budget
from adaflash.engine.speculation.step import Block, Outcome, StepParts, speculative_step
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import Verified
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence, StepPlan
from tests.engine.scripted import cheap_costs

VOCAB, LENGTH = 4, 3
PROMPT = [1]
BATCH = 2500  # texts sampled together
LIMITS = ModelLimits(VOCAB, frozenset(), max_model_len=100)
FAR = 4.75  # standard deviations: one chance in a million


@cache
def target_logits(text: tuple[int, ...]) -> Tensor:
    draw = random.Random(f"target {text}")
    return torch.tensor([draw.gauss(0, 1) for _ in range(VOCAB)])


@cache
def draft_logits(text: tuple[int, ...], depth: int) -> Tensor:
    """Like the target's after `text`, the less so the deeper; it never sees other drafts."""
    draw = random.Random(f"draft {text} {depth}")
    return target_logits(text) + torch.tensor([draw.gauss(0, depth) for _ in range(VOCAB)])


class TableTarget:
    """See Target."""

    def verify(self, rows: Many[VerifyRow]) -> Verified:
        logits = [
            target_logits((*row.row.sequence.token_ids, *row.drafts[:count]))
            for row in rows
            for count in range(row.num_logits)
        ]
        empty = torch.empty(0)
        return Verified(torch.stack(logits), empty, empty, empty)


class TableDrafter:
    """See DraftSource."""

    def __init__(self) -> None:
        self._sampler = Sampler(VOCAB, frozenset())

    def denoise(self, rows: Many[Row], width: int) -> Block:
        return Block(tuple(rows), torch.zeros(len(rows), width, 1))

    def estimate(self, block: Block) -> Estimate:
        num_rows, width, _ = block.hidden.shape
        return Estimate(np.full((num_rows, width - 1), 0.5), np.full(num_rows, 0.5))

    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        places = [(row, j) for row, n in zip(block.rows, lengths, strict=True) for j in range(n)]
        if not places:
            return [()] * len(block.rows)
        logits = torch.stack([draft_logits(tuple(r.sequence.token_ids), j) for r, j in places])
        spots = [ChoiceRow(row.sequence, unseen=j) for row, j in places]
        chosen = iter(self._sampler.token_ids(logits, spots))
        return [tuple(next(chosen) for _ in range(length)) for length in lengths]

    def observe(self, verified: Verified) -> None:
        pass


def commit(outcome: Outcome) -> TokenDelta:
    sequence = outcome.row.sequence
    sequence.token_ids.extend(choice.token_id for choice in outcome.emitted)
    sequence.num_committed = len(sequence.token_ids) - 1
    return TokenDelta(request_id="", num_accepted=outcome.num_accepted)


def sample(params: SamplingParams, first_seed: int, parts: StepParts) -> tuple[list[Sequence], int]:
    """BATCH texts of LENGTH tokens; how many drafts were accepted on the way."""
    sequences = []
    for seed in range(first_seed, first_seed + BATCH):
        sampling = SamplingParams(
            seed=seed, max_tokens=99, temperature=params.temperature, top_p=params.top_p,
            presence_penalty=params.presence_penalty,
        )  # fmt: skip
        request = Request(request_id=f"{seed}", prompt_ids=PROMPT, sampling=sampling)
        sequences.append(Sequence(request, order=seed))
    num_accepted = 0
    while unfinished := [s for s in sequences if s.num_output_tokens < LENGTH]:
        rows = [Row(s, s.num_committed, 1, RowKind.VERIFY, draft_slots=3) for s in unfinished]
        plan = StepPlan(tuple(rows), draft_room=10**6)
        deltas = speculative_step(plan, parts, commit).deltas
        num_accepted += sum(delta.num_accepted for delta in deltas)
    return sequences, num_accepted


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text, by enumeration."""
    found = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for count, token in enumerate(text):
            probability *= conditional(text[:count], params)[token]
        found[text] = probability
    return found


def conditional(output: tuple[int, ...], params: SamplingParams) -> list[float]:
    logits = target_logits((*PROMPT, *output)).tolist()
    scores = [
        (logit - params.presence_penalty * (token in output)) / params.temperature
        for token, logit in enumerate(logits)
    ]
    total = sum(map(math.exp, scores))
    probabilities = [math.exp(score) / total for score in scores]
    kept, mass = set[int](), 0.0
    for token in sorted(range(VOCAB), key=lambda token: -probabilities[token]):
        if mass < params.top_p:
            kept.add(token)
        mass += probabilities[token]
    mass = sum(probabilities[token] for token in kept)
    return [p / mass if token in kept else 0.0 for token, p in enumerate(probabilities)]


@pytest.mark.parametrize(
    ("params", "num_samples"),
    [
        (SamplingParams(seed=0, max_tokens=1, temperature=1.0), 100_000),
        (
            SamplingParams(seed=0, max_tokens=1, temperature=0.7, top_p=0.9, presence_penalty=0.9),
            20_000,
        ),
    ],
    ids=["plain", "filtered and penalised"],
)
def test_the_distribution_is_the_targets(params: SamplingParams, num_samples: int) -> None:
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=2)
    budget = drafting_budget(config, (4,), LIMITS, cheap_costs())
    parts = StepParts(TableTarget(), Sampler(VOCAB, frozenset()), budget, TableDrafter())
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for first_seed in range(0, num_samples, BATCH):
        sequences, accepted = sample(params, first_seed, parts)
        num_accepted += accepted
        counts.update(tuple(s.token_ids[1 : 1 + LENGTH]) for s in sequences)
    expected = {text: p * num_samples for text, p in exact(params).items()}
    possible = [text for text, mean in expected.items() if mean > 0]
    assert counts.keys() <= set(possible)
    chi_square = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in possible)
    # Wilson and Hilferty's approximation of its quantile.
    freedom = len(possible) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + FAR * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit
    assert num_accepted > 0.3 * num_samples
