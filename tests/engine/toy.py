"""A toy target: its logits are a fixed function of the text before them, no weights, no pages."""

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.engine.batch_inputs import VerifyRow
from adaflash.engine.engine import Engine
from adaflash.engine.messages import StepReport, TokenDelta
from adaflash.engine.pages import PagePool
from adaflash.engine.sampler import Sampler
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.speculation.budget import Budget
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.policies import plain_budget
from adaflash.engine.speculation.step import DraftSource, StepParts
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import Verified
from adaflash.engine.types import Request, SamplingParams

VOCAB = 32
EOS = 0


def toy_logits(text: Many[int]) -> Tensor:
    """[VOCAB] float32."""
    draw = random.Random(str(list(text)))
    return torch.tensor([draw.gauss(0, 2) for _ in range(VOCAB)])


class ToyTarget:
    """See Target. Counts its passes and the tokens of each."""

    def __init__(self) -> None:
        self.tokens_of_passes: list[int] = []

    def verify(self, rows: Many[VerifyRow]) -> Verified:
        self.tokens_of_passes.append(sum(row.num_tokens for row in rows))
        wanted = []
        for row in rows:
            known = row.row.sequence.token_ids
            wanted += [toy_logits(known + list(row.drafts[:n])) for n in range(row.num_logits)]
        logits = torch.stack(wanted) if wanted else torch.empty(0, VOCAB)
        empty = torch.empty(0)
        return Verified(logits, empty, empty, empty)


@dataclass(frozen=True)
class ToySize:
    num_pages: int = 64
    seqs: int = 8
    tokens: int = 16
    max_model_len: int = 100
    draft_slots: int = 0


def toy_engine(
    size: ToySize = ToySize(),
    *,
    target: ToyTarget | None = None,
    drafter: DraftSource | None = None,
    budget: Budget | None = None,
    lookup: Lookup | None = None,
) -> Engine:
    pool = PagePool(size.num_pages, page_size=4)
    scheduler = Scheduler(
        pool,
        max_num_seqs=size.seqs,
        max_batched_tokens=size.tokens,
        prefix_cache=True,
        draft_slots=size.draft_slots,
    )
    limits = ModelLimits(VOCAB, frozenset({EOS}), size.max_model_len)
    sampler = Sampler(VOCAB, limits.eos_token_ids)
    budget = budget or plain_budget(limits)
    parts = StepParts(target or ToyTarget(), sampler, budget, drafter, lookup)
    return Engine(pool, scheduler, parts, limits)


def request(name: str, prompt: list[int], sampling: SamplingParams) -> Request:
    return Request(request_id=name, prompt_ids=prompt, sampling=sampling)


def run(engine: Engine, requests: Many[Request]) -> dict[str, list[TokenDelta]]:
    """Serve all requests at once; the deltas of each."""
    for item in requests:
        engine.add(item)
    return drain(engine)


def drain(engine: Engine) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        report: StepReport = engine.step()
        engine.check_integrity()
        for delta in report.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    for own in deltas.values():
        endings = [delta.finish_reason is not None for delta in own]
        assert endings == [False] * (len(own) - 1) + [True], "not one ending, at the end"
    return deltas


def text(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
