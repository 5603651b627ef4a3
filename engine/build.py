"""From settings and a checkpoint to a running engine."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.engine.config import EngineConfig
from adaflash.engine.devices import GIB, Device, cache_bytes, choose_device
from adaflash.engine.engine import Engine
from adaflash.engine.errors import ConfigError
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.messages import EngineFacts
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.weights import load_decoder
from adaflash.engine.pages import PagePool
from adaflash.engine.sampler import Sampler
from adaflash.engine.scheduler import Scheduler
from adaflash.engine.stopping import ModelLimits
from adaflash.engine.target import TargetModel
from adaflash.kernels.attention import AttentionBackend
from adaflash.kernels.reference_attention import ReferenceAttention


@dataclass(frozen=True)
class CacheSize:
    """How many pages there are, and how long one request may get on them."""

    num_pages: int
    max_model_len: int  # tokens


def build_engine(config: EngineConfig) -> tuple[Engine, EngineFacts]:
    """Load the model and lay out the cache.

    Raises ConfigError for settings that do not fit the machine or the model, CheckpointError for a
    model that cannot be loaded.
    """
    started = time.monotonic()
    config.check()
    device = choose_device(config)
    torch.set_num_threads(device.num_threads)
    decoder = load_decoder(Path(config.model_path), device.dtype, device.device)
    size = size_cache(config, decoder.config, device)
    attention = ReferenceAttention()
    engine = assemble(config, decoder, device, size, attention)
    return engine, EngineFacts(
        pid=os.getpid(),
        vocab_size=decoder.config.vocab_size,
        max_model_len=size.max_model_len,
        num_pages=size.num_pages,
        page_size=config.page_size,
        dtype=device.dtype_name,
        device=str(device.device),
        num_threads=device.num_threads,
        attention=attention.name,
        load_s=time.monotonic() - started,
    )


def assemble(
    config: EngineConfig,
    decoder: Decoder,
    device: Device,
    size: CacheSize,
    attention: AttentionBackend,
) -> Engine:
    """Put the parts together around a loaded decoder."""
    model = decoder.config
    kv = KVCache(
        num_layers=model.num_layers,
        num_pages=size.num_pages,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=device.dtype,
        device=device.device,
    )
    pool = PagePool(size.num_pages, config.page_size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        prefix_cache=config.prefix_cache,
    )
    eos = frozenset(id_ for id_ in model.eos_token_ids if id_ < model.vocab_size)
    return Engine(
        pool,
        scheduler,
        TargetModel(decoder, kv, attention),
        Sampler(model.vocab_size, eos),
        ModelLimits(model.vocab_size, eos, size.max_model_len),
    )


def size_cache(config: EngineConfig, model: ModelConfig, device: Device) -> CacheSize:
    """Turn the memory budget into pages; no more than all running requests could ever fill."""
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the model's {model.max_position_embeddings} tokens"
        )
    bytes_per_token = (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * device.dtype.itemsize
    )
    bytes_per_page = bytes_per_token * config.page_size
    most = config.max_num_seqs * -(-wanted // config.page_size)
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
