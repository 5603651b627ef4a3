"""The training loop: batches, losses, optimisers, checkpoints.

Everything the loop knows is in its checkpoint, and a batch is a function of seed and step: a run
that was killed goes on as if it had not been.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.training.batches import BatchMaker
from adaflash.training.config import FitConfig
from adaflash.training.evaluate import Evaluation, evaluate
from adaflash.training.features import Text, TextStore
from adaflash.training.new_drafter import draft_vocabulary, new_drafter, save_drafter
from adaflash.training.objective import Figures, TargetEnds, training_loss

LOG_EVERY = 50  # steps
STATE = "state.pt"
SMOOTH = 0.98  # of the logged figures


class State(TypedDict):
    """What STATE holds."""

    step: int
    token_ids: Tensor
    drafter: dict[str, Tensor]
    optimizers: list[dict[str, object]]


@dataclass(frozen=True)
class Data:
    """Texts to learn from, and others to judge by."""

    train: TextStore
    held_out: Sequence[Text]


class Trainer:
    """One run in one folder: `drafter/` is the newest whole drafter, `log.jsonl` its history."""

    def __init__(self, config: FitConfig, decoder: Decoder, data: Data, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._data = data
        self._batches = BatchMaker(data.train, config)
        eos = [id_ for id_ in decoder.config.eos_token_ids if id_ < decoder.config.vocab_size]
        token_ids, self.coverage = draft_vocabulary(
            data.train.trajectories, config.drafter.vocab_size, eos
        )
        self.step = 0
        state = _load_state(folder)
        if state is not None:
            token_ids = state["token_ids"]
        self.drafter = new_drafter(decoder.config, config.drafter, token_ids, config.seed)
        self._ends = TargetEnds.of(decoder, token_ids)
        self._optimizers = optimizers_of(self.drafter, config)
        if state is not None:
            self.step = state["step"]
            self.drafter.load_state_dict(state["drafter"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def run(self, say: Callable[[str], None], until: int | None = None) -> None:
        """Train to the last step, or to `until`; saves on the way and at the end."""
        config = self._config
        last = min(config.steps, until or config.steps)
        smooth: dict[str, float] = {}
        saved_s = started_s = time.monotonic()
        first = self.step
        while self.step < last:
            figures = self.train_step()
            for name, value in asdict(figures).items():
                smooth[name] = SMOOTH * smooth.get(name, value) + (1 - SMOOTH) * value
            if self.step % LOG_EVERY == 0:
                per_step = (time.monotonic() - started_s) / (self.step - first)
                self._log(smooth | {"step": self.step, "s_per_step": per_step})
                say(_line(self.step, last, smooth, per_step))
            if self.step % config.evaluate_every == 0:
                self._judge(say)
            if time.monotonic() - saved_s > config.save_every_s:
                self.save()
                saved_s = time.monotonic()
        self.save()
        self._judge(say)

    def train_step(self) -> Figures:
        """One step of both optimisers."""
        config = self._config
        batch = self._batches.batch(self.step)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        self.drafter.train()
        loss, figures = training_loss(self.drafter, self._ends, batch, config.losses, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.drafter.parameters(), config.max_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * learning_rate(self.step, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return figures

    def judge(self) -> Evaluation:
        """How the drafter does on the held-out texts."""
        self.drafter.eval()
        return evaluate(self.drafter, self._ends, self._data.held_out)

    def save(self) -> None:
        """The drafter and the whole state of the loop; either is replaced by a rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = self._folder / f".{STATE}"
        assert self.drafter.token_ids is not None
        state = State(
            step=self.step,
            token_ids=self.drafter.token_ids,
            drafter=self.drafter.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in self._optimizers],
        )
        torch.save(state, scratch)
        scratch.replace(self._folder / STATE)
        save_drafter(self.drafter, self._folder / "drafter")

    def _judge(self, say: Callable[[str], None]) -> None:
        found = self.judge()
        self._log({"step": self.step, **found.as_json()})
        say(f"step {self.step}: held out: {found.line()}")

    def _log(self, entry: dict[str, object] | dict[str, float]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def learning_rate(step: int, config: FitConfig) -> float:
    """Share of the full rate: up, level, and down to 0 at the end."""
    up = (step + 1) / max(1.0, config.warmup * config.steps)
    down = (config.steps - step) / max(1.0, config.decay * config.steps)
    return min(1.0, up, down)


def optimizers_of(drafter: Drafter, config: FitConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest and for the survival head."""
    matrices, others = list[Tensor](), list[Tensor]()
    for name, parameter in drafter.named_parameters():
        is_matrix = parameter.ndim == 2 and "survival_head" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(
        [{"params": matrices, "base_lr": config.matrix_lr}],
        lr=config.matrix_lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [{"params": others, "base_lr": config.vector_lr}],
        lr=config.vector_lr,
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    return [muon, adamw]


def _load_state(folder: Path) -> State | None:
    path = folder / STATE
    if not path.exists():
        return None
    state: State = torch.load(path, weights_only=True)
    return state


def _line(step: int, last: int, smooth: dict[str, float], per_step: float) -> str:
    left = (last - step) * per_step / 60
    return (
        f"step {step}/{last}: loss {smooth['loss']:.3f}, cross-entropy "
        f"{smooth['cross_entropy']:.3f}, head {smooth['head_loss']:.3f}, accepted length "
        f"{1 + smooth['accepted']:.2f}, {per_step:.2f} s a step, {left:.0f} min left"
    )
