"""From a checkpoint to a decoder, with every tensor accounted for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.gguf_checkpoint import GgufCheckpoint
from adaflash.engine.models.rope import inverse_frequencies

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store what the config says anyway


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the rows of a parameter that it fills."""

    name: str  # Hugging Face's
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
        name: list(sources_of(name, checkpoint.config)) for name, _ in decoder.named_parameters()
    }
    _account(checkpoint, {source.name for parts in sources.values() for source in parts})
    for name, parameter in list(decoder.named_parameters()):
        filled = torch.empty(parameter.shape, dtype=dtype, device=device)
        _fill(filled, sources[name], checkpoint)
        _set_parameter(decoder, name, filled)
    decoder.inv_freq = inv_freq
    return decoder.eval()


def sources_of(parameter: str, config: ModelConfig) -> Iterator[Source]:
    """Where a parameter's rows come from; fused ones come from several tensors."""
    head_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", head_rows[0]), ("k_proj", head_rows[1]), ("v_proj", head_rows[1])),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
    }
    prefix = "" if parameter.startswith("lm_head") else "model."
    module = parameter.split(".")[-2]
    for part, num_rows in fused.get(module, ()):
        yield Source(prefix + parameter.replace(module, part), num_rows)
    if module not in fused:
        yield Source(prefix + parameter, _num_rows(module, config))


def _num_rows(module: str, config: ModelConfig) -> int:
    if module in ("embed_tokens", "lm_head"):
        return config.vocab_size
    return config.head_dim if module in ("q_norm", "k_norm") else config.hidden_size


def _account(checkpoint: Checkpoint, wanted: set[str]) -> None:
    """Every tensor that is wanted is there, and every one that is there is wanted."""
    present = {name for name in checkpoint.names() if not name.endswith(IGNORED_SUFFIX)}
    if checkpoint.config.tie_word_embeddings and {HEAD, EMBEDDING} <= present:
        # Some tied checkpoints store their head all the same.
        if not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
            raise CheckpointError(
                f"{HEAD} differs from {EMBEDDING}, but the config ties them: correct "
                "tie_word_embeddings"
            )
        present.discard(HEAD)
    if missing := sorted(wanted - present):
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if left_over := sorted(present - wanted):
        raise CheckpointError(f"the checkpoint has tensors of no known use: {_listed(left_over)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _fill(target: Tensor, sources: list[Source], checkpoint: Checkpoint) -> None:
    start = 0
    for source in sources:
        rows = target[start : start + source.num_rows]
        tensor = checkpoint.tensor(source.name)
        if tensor.shape != rows.shape:
            raise CheckpointError(
                f"{source.name} has shape {tuple(tensor.shape)}, but the config asks for "
                f"{tuple(rows.shape)}"
            )
        rows.copy_(tensor)
        start += source.num_rows


def _set_parameter(decoder: Decoder, name: str, value: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
