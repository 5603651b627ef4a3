"""What a block-diffusion drafter looks like, from the config.json of its checkpoint. No torch.

The layout is DFlash's (arXiv 2602.06036) with AdaFlash's length head (arXiv 2607.19223): published
checkpoints load as they are. Ours add, inside `dflash_config`: `widths`, block sizes that the
drafter was trained for besides the whole block; a `mask_token_id` of null, if the checkpoint stores
the mask's embedding itself.
"""

from dataclasses import dataclass

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.config import Fields, Json, ModelConfig, from_hf

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class DrafterConfig:
    """A stack of decoder layers that fills a block of masks at once."""

    layers: ModelConfig
    block_size: int  # the newest known token and the drafts behind it
    widths: tuple[int, ...]  # block sizes it may denoise, ascending; the last is block_size
    tap_layers: tuple[int, ...]  # of the target, whose outputs it reads
    num_target_layers: int
    mask_token_id: int | None  # None: the checkpoint has a mask embedding of its own


def drafter_config(config: Json, target: ModelConfig, num_inputs: int) -> DrafterConfig:
    """From config.json. num_inputs: columns of the checkpoint's `fc`.

    Raises CheckpointError for anything that would be computed wrongly, or for another target.
    """
    fields = Fields(config, "the drafter's config.json")
    own = config.get("dflash_config")
    if not isinstance(own, dict):
        raise CheckpointError(
            "the drafter's config.json has no dflash_config: this is no DFlash or AdaFlash drafter"
        )
    has_head = own.get("use_thresh_head_two_model", True)
    if has_head and not own.get("thresh_head_direct_len", True):
        raise CheckpointError(
            "the drafter's length head is of another kind (thresh_head_direct_len is false)"
        )
    block_size = fields.integer("block_size")
    if block_size < 2:
        raise CheckpointError(f"block_size must be at least 2, not {block_size}")
    layers = _layers(config)
    num_target_layers = fields.integer("num_target_layers")
    _check_target(layers, num_target_layers, target)
    mask = own.get("mask_token_id")
    drafter = DrafterConfig(
        layers=layers,
        block_size=block_size,
        widths=_widths(own.get("widths"), block_size),
        tap_layers=_tap_layers(own.get("target_layer_ids"), target, num_inputs),
        num_target_layers=num_target_layers,
        mask_token_id=None
        if mask is None
        else Fields(own, "dflash_config").integer("mask_token_id"),
    )
    if mask is not None and not 0 <= mask < target.vocab_size:
        raise CheckpointError(
            f"mask_token_id {mask} is outside the vocabulary of {target.vocab_size}"
        )
    return drafter


def default_tap_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's rule: spread from the second layer to the third from the end."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def _layers(config: Json) -> ModelConfig:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"draft layers of the type {model_type!r} are not supported; these are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return from_hf({**config, "architectures": [ARCHITECTURES[model_type]]}, {})


def _check_target(layers: ModelConfig, num_target_layers: int, target: ModelConfig) -> None:
    for what, ours, theirs in (
        ("hidden size", layers.hidden_size, target.hidden_size),
        ("vocabulary", layers.vocab_size, target.vocab_size),
        ("number of target layers", num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"the drafter was made for another model: its {what} is {ours}, and the "
                f"target's is {theirs}"
            )


def _widths(given: object, block_size: int) -> tuple[int, ...]:
    if given is None:
        return (block_size,)
    if not isinstance(given, list) or not all(type(w) is int for w in given):
        raise CheckpointError(f"widths must be a list of whole numbers, not {given!r}")
    if not all(2 <= width <= block_size for width in given):
        raise CheckpointError(f"widths must be between 2 and the block size, not {given}")
    return tuple(sorted({*given, block_size}))


def _tap_layers(given: object, target: ModelConfig, num_inputs: int) -> tuple[int, ...]:
    num_taps, rest = divmod(num_inputs, target.hidden_size)
    if rest:
        raise CheckpointError(
            f"fc.weight reads {num_inputs} values, which are no whole hidden states of "
            f"{target.hidden_size}"
        )
    if given is None:
        given = list(default_tap_layers(target.num_layers, num_taps))
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise CheckpointError(f"target_layer_ids must be a list of whole numbers, not {given!r}")
    if outside := [layer for layer in given if not 0 <= layer < target.num_layers]:
        raise CheckpointError(
            f"target_layer_ids {outside} are out of range: the target has {target.num_layers} "
            "layers"
        )
    if len(given) != num_taps:
        raise CheckpointError(
            f"target_layer_ids names {len(given)} layers, but fc.weight reads {num_taps}"
        )
    return tuple(given)
