"""From settings and checkpoints to a running engine."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from adaflash.engine.batch_inputs import Paging
from adaflash.engine.config import EngineConfig, Policy, SpeculationConfig
from adaflash.engine.devices import GIB, Device, cache_bytes, choose_device, processor_name
from adaflash.engine.engine import Engine
from adaflash.engine.errors import ConfigError
from adaflash.engine.kv_cache import KVCache, bytes_per_token
from adaflash.engine.learning.start import (
    DrafterFiles,
    Served,
    find_drafter_files,
    start_learning,
)
from adaflash.engine.learning.versions import drafter_name
from adaflash.engine.messages import EngineFacts, SpeculationFacts
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.heads import NoHead
from adaflash.engine.models.weights import load_decoder, load_drafter
from adaflash.engine.pages import PagePool
from adaflash.engine.sampler import Sampler
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.speculation.block_drafter import BlockDrafter
from adaflash.engine.speculation.budget import Budget
from adaflash.engine.speculation.cost_file import KeptCosts
from adaflash.engine.speculation.lookup import Lookup
from adaflash.engine.speculation.measure import Measured, MeasureLimits, measure_costs
from adaflash.engine.speculation.policies import drafting_budget, plain_budget
from adaflash.engine.speculation.step import DraftSource, StepParts
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import TargetModel
from adaflash.kernels.attention import AttentionBackend
from adaflash.kernels.reference_attention import ReferenceAttention


@dataclass(frozen=True)
class CacheSize:
    """How many pages there are, and how long one request may get on them."""

    num_pages: int
    max_model_len: int  # tokens


@dataclass(frozen=True)
class Models:
    """What was loaded, and where it runs."""

    decoder: Decoder
    drafter: Drafter | None
    device: Device
    attention: AttentionBackend


@dataclass(frozen=True)
class Drafting:
    """A draft source, and the block sizes that it can think of, ascending."""

    source: DraftSource
    widths: tuple[int, ...]


def build_engine(config: EngineConfig) -> tuple[Engine, EngineFacts]:
    """Load the models and lay out the cache.

    Raises ConfigError for settings that do not fit the machine or the model, CheckpointError for a
    model that cannot be loaded.
    """
    started = time.monotonic()
    config.check()
    device = choose_device(config)
    torch.set_num_threads(device.num_threads)
    files = find_drafter_files(config)
    path = None if files.checkpoint is None else str(files.checkpoint)
    config = msgspec.structs.replace(config, drafter_path=path)
    decoder = load_decoder(Path(config.model_path), device.dtype, device.device)
    drafter = choose_drafter(config, decoder, device)
    models = Models(decoder, drafter, device, ReferenceAttention())
    size = size_cache(config, models)
    engine = assemble(config, models, size, files=files)
    return engine, EngineFacts(
        pid=os.getpid(),
        vocab_size=decoder.config.vocab_size,
        max_model_len=size.max_model_len,
        num_pages=size.num_pages,
        page_size=config.page_size,
        dtype=device.dtype_name,
        device=str(device.device),
        num_threads=device.num_threads,
        attention=models.attention.name,
        load_s=time.monotonic() - started,
        speculation=speculation_facts(config, drafter),
    )


def assemble(
    config: EngineConfig,
    models: Models,
    size: CacheSize,
    drafting: Drafting | None = None,
    files: DrafterFiles | None = None,
) -> Engine:
    """Put the parts together around loaded models.

    drafting: another draft source than the models' own drafter; files: where that comes from.
    """
    if drafting is None and models.drafter is not None:
        drafting = _block_drafting(config, models, size)
    source, widths = (drafting.source, drafting.widths) if drafting else (None, ())
    lookup = _lookup_of(config.speculation)
    decoder = models.decoder
    limits = ModelLimits(decoder.config.vocab_size, _eos_of(decoder), size.max_model_len)
    pool = PagePool(size.num_pages, config.page_size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        prefix_cache=config.prefix_cache,
        draft_slots=_longest_row(config, widths) - 1,
    )
    kv = _cache_of(decoder.config, config, models, size)
    taps = models.drafter.config.tap_layers if models.drafter else ()
    target = TargetModel(decoder, kv, _paging_of(config, models), taps)
    chooser = Sampler(limits.vocab_size, limits.eos_token_ids)
    if source is None and lookup is None:
        engine = Engine(pool, scheduler, StepParts(target, chooser, plain_budget(limits)), limits)
        engine.learning = start_learning(config, files or DrafterFiles())
        return engine
    measured = Measured(target, chooser, source, pool)
    kept = _costs_of(config, models, measured, widths)

    def new_budget() -> Budget:
        return drafting_budget(config.speculation, widths, limits, kept.costs)

    parts = StepParts(target, chooser, new_budget(), source, lookup)
    engine = Engine(pool, scheduler, parts, limits, on_rest=kept.save_if_due)

    def change_over(drafter: Drafter) -> None:
        """What was learnt of the old drafter is forgotten; costs depend on the shape alone."""
        assert isinstance(source, BlockDrafter)
        source.swap(drafter, _draft_sampler(decoder, drafter))
        engine.change_budget(new_budget())

    served = None
    if models.drafter is not None:
        device = models.device
        served = Served(decoder.config, models.drafter, device.dtype, device.device, change_over)
    engine.learning = start_learning(config, files or DrafterFiles(), served)
    return engine


def _block_drafting(config: EngineConfig, models: Models, size: CacheSize) -> Drafting:
    """The models' own drafter, with its layers of the pages."""
    drafter, decoder = models.drafter, models.decoder
    assert drafter is not None
    kv = _cache_of(drafter.config.layers, config, models, size)
    sampler = _draft_sampler(decoder, drafter)
    source = BlockDrafter(drafter, decoder, kv, sampler, _paging_of(config, models))
    return Drafting(source, drafter.config.widths)


def _lookup_of(speculation: SpeculationConfig) -> Lookup | None:
    """The second draft source; None where it is not wanted."""
    if speculation.policy is Policy.OFF or speculation.lookup_drafts == 0:
        return None
    return Lookup(speculation.lookup_drafts, speculation.lookup_store_tokens)


def _longest_row(config: EngineConfig, widths: tuple[int, ...]) -> int:
    """Tokens of a decoding row with all the drafts it may have: a block, or looked up."""
    speculation = config.speculation
    looked_up = 0 if speculation.policy is Policy.OFF else speculation.lookup_drafts
    return max((1 + looked_up, *widths))


def _draft_sampler(decoder: Decoder, drafter: Drafter) -> Sampler:
    return Sampler(decoder.config.vocab_size, _eos_of(decoder), drafter.token_ids)


def _eos_of(decoder: Decoder) -> frozenset[int]:
    return frozenset(id_ for id_ in decoder.config.eos_token_ids if id_ < decoder.config.vocab_size)


def _paging_of(config: EngineConfig, models: Models) -> Paging:
    return Paging(models.attention, config.page_size, models.device.device)


def _cache_of(
    layers: ModelConfig, config: EngineConfig, models: Models, size: CacheSize
) -> KVCache:
    return KVCache(
        layers,
        num_pages=size.num_pages,
        page_size=config.page_size,
        dtype=models.device.dtype,
        device=models.device.device,
    )


def _costs_of(
    config: EngineConfig, models: Models, parts: Measured, widths: tuple[int, ...]
) -> KeptCosts:
    """Step costs of these models on this machine: kept from an earlier start, or measured now."""
    device, drafter = models.device, models.drafter
    limits = MeasureLimits(
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        block_size=widths[-1] if widths else _longest_row(config, widths),
        vocab_size=models.decoder.config.vocab_size,
    )
    key = repr(
        (
            models.decoder.config,
            drafter.config if drafter else type(parts.drafter).__name__,
            limits,
            processor_name(device.device),
            (device.dtype_name, device.num_threads, models.attention.name, config.page_size),
        )
    )
    folder = Path(config.cost_dir) if config.cost_dir else None
    return KeptCosts(folder, key, lambda: measure_costs(parts, limits))


def choose_drafter(config: EngineConfig, decoder: Decoder, device: Device) -> Drafter | None:
    """The drafter of the settings, if they speculate. Raises ConfigError, CheckpointError."""
    speculation = config.speculation
    if config.drafter_path is None or speculation.policy is Policy.OFF:
        return None
    path = Path(config.drafter_path)
    drafter = load_drafter(path, decoder.config, device.dtype, device.device)
    longest = drafter.config.block_size - 1
    if speculation.fixed_length is not None and speculation.fixed_length > longest:
        raise ConfigError(
            f"fixed:{speculation.fixed_length} asks for more drafts than this drafter's blocks "
            f"hold ({longest})"
        )
    if speculation.policy is Policy.THRESHOLD and isinstance(drafter.head, NoHead):
        raise ConfigError(
            "the policy threshold needs a drafter with a length head, and this one has none: use "
            "goodput or fixed:K"
        )
    return drafter


def speculation_facts(config: EngineConfig, drafter: Drafter | None) -> SpeculationFacts:
    speculation = config.speculation
    if speculation.policy is Policy.OFF:
        return SpeculationFacts(policy="off")
    if drafter is None and speculation.lookup_drafts == 0:
        why_off = "no drafter and no lookup; see --drafter and --lookup-drafts"
        return SpeculationFacts(policy="off", why_off=why_off)
    length = speculation.fixed_length
    facts = SpeculationFacts(
        policy=speculation.policy.value if length is None else f"fixed:{length}",
        lookup_drafts=speculation.lookup_drafts,
    )
    if drafter is None:
        return facts
    return msgspec.structs.replace(
        facts,
        drafter=drafter_name(Path(config.drafter_path or "")),
        head=drafter.head.name,
        block_size=drafter.config.block_size,
        widths=list(drafter.config.widths),
    )


def size_cache(config: EngineConfig, models: Models) -> CacheSize:
    """Turn the memory budget into pages; no more than all running requests could ever fill.

    A page holds the target's keys and values and, beside them, the draft layers'.
    """
    model, device = models.decoder.config, models.device
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the model's {model.max_position_embeddings} tokens"
        )
    bytes_per_page = bytes_per_token(model, device.dtype) * config.page_size
    if models.drafter is not None:
        layers = models.drafter.config.layers
        bytes_per_page += bytes_per_token(layers, device.dtype) * config.page_size
    # Drafts need slots behind a sequence's end.
    widths = models.drafter.config.widths if models.drafter else ()
    longest = wanted + _longest_row(config, widths) - 1
    most = config.max_num_seqs * -(-longest // config.page_size)
    num_pages = min(cache_bytes(config, device.device) // bytes_per_page, most)
    capacity = num_pages * config.page_size
    if capacity < 2 or (config.max_model_len is not None and capacity < wanted):
        needed = -(-wanted // config.page_size) * bytes_per_page / GIB
        raise ConfigError(
            f"the KV cache holds {capacity} tokens, and one request may have {wanted}: "
            f"set --kv-cache-gib to at least {math.ceil(needed * 100) / 100}, or lower "
            "--max-model-len"
        )
    return CacheSize(num_pages, min(wanted, capacity))
