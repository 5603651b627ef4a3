"""From a checkpoint to a decoder or a drafter, with every tensor accounted for."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.checkpoint import (
    Checkpoint,
    SafetensorsCheckpoint,
    SafetensorsFolder,
    Tensors,
    read_json,
)
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.drafter_config import drafter_config
from adaflash.engine.models.gguf_checkpoint import GgufCheckpoint
from adaflash.engine.models.heads import ChainHead, SurvivalHead, ThresholdHead
from adaflash.engine.models.rope import inverse_frequencies

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKEN_IDS = "draft_token_ids"  # of a reduced draft vocabulary
FC = "fc.weight"
CHAIN_HEAD = "chain_head"
LENGTH_HEADS = {"thresh_head_two_model": ThresholdHead, "survival_head": SurvivalHead}
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store what the config says anyway


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the rows of a parameter that it fills."""

    name: str
    num_rows: int


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face folder or a GGUF file. Raises CheckpointError."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path)
    raise CheckpointError(f"{path} is neither a Hugging Face folder nor a GGUF file")


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model at `path`, its weights in `dtype` on `device`. Raises CheckpointError."""
    return decoder_from(open_checkpoint(path), dtype, device)


def decoder_from(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Fill a decoder from a checkpoint, tensor by tensor. Raises CheckpointError."""
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config)
    inv_freq = inverse_frequencies(checkpoint.config).to(device)
    sources = {
        name: sources_of(name, parameter, checkpoint.config, prefix="model.")
        for name, parameter in decoder.named_parameters()
    }
    _account(_names_without_doubles(checkpoint), sources)
    fill_parameters(decoder, sources, checkpoint, dtype, device)
    decoder.inv_freq = inv_freq
    return decoder.eval()


def load_drafter(
    path: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Drafter:
    """The drafter in the folder `path`, which must have been made for `target`.

    Raises CheckpointError.
    """
    tensors = SafetensorsFolder(path)
    names = tensors.names()
    if FC not in names:
        raise CheckpointError(f"{path} has no {FC}: this is no DFlash or AdaFlash drafter")
    _, num_inputs = _matrix_shape(FC, tensors)
    config = drafter_config(read_json(path / "config.json"), target, num_inputs)
    # Qwen3's layers have norms of q and k, a Llama target's need not: the checkpoint decides.
    has_norm = any(name.endswith("self_attn.q_norm.weight") for name in names)
    config = replace(config, layers=replace(config.layers, qk_norm=has_norm))
    with torch.device("meta"):
        drafter = Drafter(config)
        _add_heads(drafter, tensors)
    inv_freq = inverse_frequencies(config.layers).to(device)
    sources = {
        name: sources_of(name, parameter, config.layers, prefix="")
        for name, parameter in drafter.named_parameters()
    }
    _account(names - {TOKEN_IDS}, sources)
    heads = {name: parts for name, parts in sources.items() if name.startswith(tuple(LENGTH_HEADS))}
    layers = {name: parts for name, parts in sources.items() if name not in heads}
    fill_parameters(drafter, layers, tensors, dtype, device)
    fill_parameters(drafter, heads, tensors, torch.float32, device)  # small, and sum much
    drafter.inv_freq = inv_freq
    if TOKEN_IDS in names:
        drafter.token_ids = _draft_vocabulary(tensors.tensor(TOKEN_IDS), target).to(device)
    return drafter.eval()


def _add_heads(drafter: Drafter, tensors: Tensors) -> None:
    """The heads that the checkpoint has."""
    size, block_size = drafter.config.layers.hidden_size, drafter.config.block_size
    for name, kind in LENGTH_HEADS.items():
        if f"{name}.down.weight" in tensors.names():
            inner_size, _ = _matrix_shape(f"{name}.down.weight", tensors)
            setattr(drafter, name, kind(size, inner_size, block_size))
    if f"{CHAIN_HEAD}.hidden.weight" in tensors.names():
        inner_size, _ = _matrix_shape(f"{CHAIN_HEAD}.hidden.weight", tensors)
        drafter.chain_head = ChainHead(size, inner_size, drafter.config.layers.rms_norm_eps)


def _matrix_shape(name: str, tensors: Tensors) -> tuple[int, int]:
    shape = tuple(tensors.tensor(name).shape)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} has shape {shape}, but must be a matrix, and not empty")
    return shape[0], shape[1]


def _draft_vocabulary(token_ids: Tensor, target: ModelConfig) -> Tensor:
    """Check the list of tokens that the drafter can propose. Returns [N] int64, ascending."""
    ids = token_ids.to(torch.int64).flatten()
    whole = not token_ids.is_floating_point() and len(ids) > 0
    if not whole or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise CheckpointError(
            f"{TOKEN_IDS} must hold token ids of the target's vocabulary of {target.vocab_size}"
        )
    ascending = ids.sort().values
    if bool((ascending.diff() == 0).any()):
        raise CheckpointError(f"{TOKEN_IDS} holds a token twice")
    return ascending


def sources_of(name: str, parameter: Tensor, config: ModelConfig, *, prefix: str) -> list[Source]:
    """Where a parameter's rows come from; fused ones come from several tensors."""
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    inner = config.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
    }
    stored = name if name.startswith("lm_head") else prefix + name
    module = name.split(".")[-2] if "." in name else name
    if module not in fused:
        return [Source(stored, parameter.shape[0])]
    return [Source(stored.replace(module, part), num_rows) for part, num_rows in fused[module]]


def _names_without_doubles(checkpoint: Checkpoint) -> set[str]:
    """Names of the tensors that must have a use."""
    names = {name for name in checkpoint.names() if not name.endswith(IGNORED_SUFFIX)}
    if checkpoint.config.tie_word_embeddings and {HEAD, EMBEDDING} <= names:
        # Some tied checkpoints store their head all the same.
        if not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
            raise CheckpointError(
                f"{HEAD} differs from {EMBEDDING}, but the config ties them: correct "
                "tie_word_embeddings"
            )
        names.discard(HEAD)
    return names


def _account(present: AbstractSet[str], sources: Mapping[str, list[Source]]) -> None:
    """Every tensor that is wanted is there, and every one that is there is wanted."""
    wanted = {source.name for parts in sources.values() for source in parts}
    if missing := sorted(wanted - present):
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if left_over := sorted(present - wanted):
        raise CheckpointError(f"the checkpoint has tensors of no known use: {_listed(left_over)}")


def fill_parameters(
    module: nn.Module,
    sources: Mapping[str, list[Source]],
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace parameters of `module` (on the meta device) by what is stored for them."""
    for name, parts in sources.items():
        filled = torch.empty(module.get_parameter(name).shape, dtype=dtype, device=device)
        _fill(filled, parts, tensors)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(filled, requires_grad=False))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _fill(target: Tensor, sources: list[Source], tensors: Tensors) -> None:
    start = 0
    for source in sources:
        rows = target[start : start + source.num_rows]
        tensor = tensors.tensor(source.name)
        if tensor.shape != rows.shape:
            raise CheckpointError(
                f"{source.name} has shape {tuple(tensor.shape)}, but the config asks for "
                f"{tuple(rows.shape)}"
            )
        rows.copy_(tensor)
        start += source.num_rows
