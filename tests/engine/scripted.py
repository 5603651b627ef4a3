"""A real tiny target over real pages, with drafters that follow a script or are real too."""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from adaflash.engine.batch_inputs import Paging, VerifyRow
from adaflash.engine.config import SpeculationConfig
from adaflash.engine.engine import Engine
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.weights import load_decoder, load_drafter
from adaflash.engine.pages import PagePool
from adaflash.engine.sampler import Sampler
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.speculation.block_drafter import BlockDrafter
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.costs import CostCurve, CostModel
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.policies import drafting_budget, plain_budget
from adaflash.engine.speculation.step import Block, DraftSource, StepParts
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import TargetModel, Verified
from adaflash.engine.types import Row
from adaflash.kernels.reference_attention import ReferenceAttention
from tests.tiny_model import EOS, VOCAB

CPU = torch.device("cpu")
BLOCK_SIZE = 8
WIDTHS = (2, 4, 8)

# Whether the draft at an absolute position of a request is right.
Script = Callable[[str, int], bool]


def oracle(request_id: str, position: int) -> bool:
    return True


def half_right(request_id: str, position: int) -> bool:
    """By request and position alone: the same however the step before went."""
    return random.Random(f"{request_id}/{position}").random() < 0.6


@dataclass
class ScriptedDrafter:
    """See DraftSource. Knows what plain decoding writes, and tells it where the script says so."""

    texts: Mapping[str, list[int]]  # prompt and output, by request
    script: Script
    confidence: float  # of its head, for every draft
    proposals: dict[tuple[str, int], list[tuple[int, ...]]] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)

    def denoise(self, rows: Many[Row], width: int) -> Block:
        for row in rows:
            assert row.draft_slots >= width - 1
            slots = len(row.sequence.pages) * PAGE_SIZE
            assert row.start + width <= slots, "no slot for a row of the block"
        self.widths.append(width)
        return Block(tuple(rows), torch.zeros(len(rows), width, 1))

    def estimate(self, block: Block) -> Estimate:
        num_rows, width, _ = block.hidden.shape
        conditional = np.full((num_rows, width - 1), self.confidence)
        return Estimate(conditional, np.full(num_rows, self.confidence))

    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        return [self._drafts(row, length) for row, length in zip(block.rows, lengths, strict=True)]

    def observe(self, verified: Verified) -> None:
        pass

    def _drafts(self, row: Row, length: int) -> tuple[int, ...]:
        name, start = row.sequence.request.request_id, row.start + 1
        known = self.texts[name]
        right = [known[p] if p < len(known) else 0 for p in range(start, start + length)]
        drafts = tuple(
            token if self.script(name, start + index) else (token + 1) % VOCAB
            for index, token in enumerate(right)
        )
        self.proposals.setdefault((name, start), []).append(drafts)
        return drafts


@dataclass(frozen=True)
class RealSize:
    num_pages: int = 100
    seqs: int = 6
    tokens: int = 48
    prefix_cache: bool = True


PAGE_SIZE = 4


class CountingTarget(TargetModel):
    """Counts passes and tokens."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.tokens_of_passes: list[int] = []

    def verify(self, rows: Many[VerifyRow]) -> Verified:
        self.tokens_of_passes.append(sum(row.num_tokens for row in rows))
        return super().verify(rows)


class RecordingDrafter(BlockDrafter):
    """A real one. Keeps what it proposed, by request, anchor position and width."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.proposals: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        width = block.hidden.shape[1]
        everything = super().propose(block, [width - 1] * len(lengths))
        for row, drafts in zip(block.rows, everything, strict=True):
            self.proposals[row.sequence.request.request_id, row.start, width] = drafts
        return [drafts[:length] for drafts, length in zip(everything, lengths, strict=True)]


@dataclass
class RealEngine:
    """A tiny model's engine, and its parts."""

    engine: Engine
    target: CountingTarget
    pool: PagePool
    drafter: DraftSource | None


@dataclass(frozen=True)
class Speculating:
    """drafter: a scripted one, the folder of a real one, or none; then there should be a lookup."""

    drafter: DraftSource | Path | None
    config: SpeculationConfig
    costs: CostModel = field(default_factory=lambda: cheap_costs())
    lookup: Lookup | None = None


def real_engine(
    model: Path, size: RealSize | None = None, speculating: Speculating | None = None
) -> RealEngine:
    size = size or RealSize()
    decoder = load_decoder(model, torch.float32, CPU)
    paging = Paging(ReferenceAttention(), PAGE_SIZE, CPU)
    pool = PagePool(size.num_pages, PAGE_SIZE)
    scheduler = Scheduler(
        pool,
        max_num_seqs=size.seqs,
        max_batched_tokens=size.tokens,
        prefix_cache=size.prefix_cache,
        draft_slots=0 if speculating is None else BLOCK_SIZE - 1,
    )
    limits = ModelLimits(VOCAB, frozenset({EOS}), size.num_pages * PAGE_SIZE)
    budget = plain_budget(limits)
    source: DraftSource | None = None
    taps: tuple[int, ...] = ()
    if speculating is not None:
        if isinstance(speculating.drafter, Path):
            source, taps = _real_drafter(speculating.drafter, decoder, paging, size)
        else:
            source = speculating.drafter
        widths = () if source is None else WIDTHS
        budget = drafting_budget(speculating.config, widths, limits, speculating.costs)
    target = CountingTarget(decoder, _cache(decoder.config, size), paging, taps)
    lookup = None if speculating is None else speculating.lookup
    parts = StepParts(target, Sampler(VOCAB, frozenset({EOS})), budget, source, lookup)
    return RealEngine(Engine(pool, scheduler, parts, limits), target, pool, source)


def _real_drafter(
    folder: Path, decoder: Decoder, paging: Paging, size: RealSize
) -> tuple[RecordingDrafter, tuple[int, ...]]:
    drafter = load_drafter(folder, decoder.config, torch.float32, CPU)
    kv = _cache(drafter.config.layers, size)
    sampler = Sampler(VOCAB, frozenset({EOS}), drafter.token_ids)
    return RecordingDrafter(drafter, decoder, kv, sampler, paging), drafter.config.tap_layers


def _cache(layers: ModelConfig, size: RealSize) -> KVCache:
    return KVCache(
        layers, num_pages=size.num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
    )


def cheap_costs() -> CostModel:
    """A machine on which verification is nearly flat: drafting pays if anything is accepted."""
    return CostModel(
        denoise=CostCurve([1, 512], [0.001, 0.002]),
        propose=CostCurve([1, 512], [0.0001, 0.001]),
        verify=CostCurve([1, 512], [0.040, 0.060]),
        choose=CostCurve([1, 512], [0.0001, 0.001]),
    )
