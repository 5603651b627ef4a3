"""What `adaflash train follow` goes by; the defaults, or one YAML file."""

from pathlib import Path

import msgspec

from adaflash.engine.errors import ConfigError
from adaflash.training.config import FitConfig, Losses


class FollowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On-policy fine-tuning, in rounds: some new texts, some steps, a judgement."""

    data: list[str] = []  # folders of older texts, mixed in so that they are not forgotten
    older_share: float = 0.25  # of the drawn texts, if there is such data
    min_new_texts: int = 128  # before a round begins
    window_tokens: int = 200_000  # newest texts that a round learns from; about 7 kB each on disk
    max_text_tokens: int = 640  # longer texts are cut
    held_out_share: float = 0.1  # of the prompts, to judge by; never trained on
    min_held_out: int = 8  # texts; without them nothing can be judged, and no round begins
    evaluate_texts: int = 60  # newest ones held out
    steps_per_round: int = 100
    texts_per_step: int = 8
    anchors_per_text: int = 64
    reject_share: float = 0.5  # of the anchors: blocks in which the server's drafts were rejected
    losses: Losses = Losses(reverse_kl=0.2, clip=0.01)
    matrix_lr: float = 3e-4
    vector_lr: float = 1.5e-4
    warmup: float = 0.1  # share of a round's steps
    decay: float = 0.5
    weight_decay: float = 0.01
    max_norm: float = 1.0  # of the gradient
    seed: int = 0
    save_every_s: float = 60.0
    keep_versions: int = 4

    def fit_config(self) -> FitConfig:
        """The same of one round, as optimisers and rates want it."""
        return FitConfig(
            data=[],
            held_out=[],
            steps=self.steps_per_round,
            matrix_lr=self.matrix_lr,
            vector_lr=self.vector_lr,
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            decay=self.decay,
        )


def read_follow_config(path: Path | None) -> FollowConfig:
    """None: the defaults. Raises ConfigError."""
    if path is None:
        return FollowConfig()
    try:
        config = msgspec.yaml.decode(path.read_bytes(), type=FollowConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot use {path}: {error}") from None
    for name in ("older_share", "held_out_share", "reject_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name} must be between 0 and 1, not {getattr(config, name)}")
    return config
