"""What `adaflash train fit` reads: one YAML file."""

from pathlib import Path

import msgspec

from adaflash.engine.errors import ConfigError


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drafter to make. The rest of its layers' shape is the target's."""

    num_layers: int = 2
    block_size: int = 8
    widths: tuple[int, ...] = (4, 8)  # block sizes that it learns, the whole one among them
    taps: tuple[int, ...] | None = None  # target layers it reads; left out: five, by DFlash's rule
    vocab_size: int = 8192  # most frequent tokens of the answers
    head_size: int = 64  # inner size of the survival head
    chain_size: int | None = 576  # inner size of the chain head; null: none


class Losses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is minimised; see training/losses.py."""

    reverse_kl: float = 0.0  # share of the reverse KL; the rest is cross-entropy
    clip: float = 0.01  # of the reverse KL of one position, after division by all weights
    gamma: float = 4.0  # position k weighs exp(-(k - 1) / gamma) ...
    explore: float = 0.3  # ... times this, or as the drafter's own survival up to it, if larger
    head: float = 1.0  # of the survival head, whose input is detached


class FitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of training."""

    data: list[str]  # folders of `adaflash train generate`
    held_out: list[str]  # the same, of prompts that are not trained on
    drafter: DrafterShape = DrafterShape()
    losses: Losses = Losses()
    steps: int = 10_000
    texts_per_step: int = 8
    anchors_per_text: int = 64
    max_text_tokens: int = 640  # longer texts are cut
    domain_weights: dict[str, float] = {}  # how often a text of a domain is taken; left out: 1
    matrix_lr: float = 2e-3  # Muon
    vector_lr: float = 1e-3  # AdamW: norms, biases, the mask, the survival head
    weight_decay: float = 0.01
    warmup: float = 0.02  # share of the steps
    decay: float = 0.25  # share of the steps at the end in which the rates fall to 0
    max_norm: float = 1.0  # of the gradient
    seed: int = 0
    save_every_s: float = 300.0
    evaluate_every: int = 1000  # steps
    evaluate_texts: int = 60


def read_fit_config(path: Path) -> FitConfig:
    """Raises ConfigError."""
    try:
        config = msgspec.yaml.decode(path.read_bytes(), type=FitConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot use {path}: {error}") from None
    shape = config.drafter
    if not shape.widths or max(shape.widths) != shape.block_size or min(shape.widths) < 2:
        raise ConfigError("drafter.widths must lie between 2 and block_size, and hold block_size")
    return config
