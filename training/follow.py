"""On-policy training beside a running server: its texts in, newer versions of the drafter out.

Rounds: when enough new texts are there, the drafter learns for some steps, is judged on texts that
were held out, and is published if its accepted length there did not fall; otherwise training goes
back to the version in use. Everything is in the state file and a batch is a function of seed, round
and step: killed at any point and started again, it comes to the same versions.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from adaflash.engine.errors import CheckpointError, ConfigError
from adaflash.engine.learning.buffer import FolderLock
from adaflash.engine.learning.versions import BUFFER, current_version, publish, version_folder
from adaflash.engine.models.checkpoint import read_json
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.weights import load_drafter
from adaflash.training.evaluate import evaluate
from adaflash.training.features import Text, TextStore, ensure_features
from adaflash.training.fit import learning_rate, optimizers_of
from adaflash.training.follow_batches import FollowBatches, split
from adaflash.training.follow_config import FollowConfig
from adaflash.training.intake import Intake
from adaflash.training.new_drafter import save_drafter
from adaflash.training.objective import Figures, TargetEnds, training_loss

TRAINER = "trainer"  # our folder in the learning folder
STATE = "state.pt"
CANDIDATE = "candidate"
ABOUT = "version.json"  # in a version: which round made it, and how it was judged
LOG_EVERY = 20  # steps
CPU = torch.device("cpu")

Say = Callable[[str], None]


class State(TypedDict):
    """What STATE holds."""

    round: int  # the current one, or the last
    step: int  # steps of it that are done
    in_round: bool
    base: str | None  # the version that it started from; None: the drafter that was given
    shards: list[str]  # that it learns from
    consumed: list[str]  # shards of the round before
    drafter: dict[str, Tensor]
    optimizers: list[dict[str, object]]


@dataclass(frozen=True)
class Judgement:
    """Accepted lengths on the texts held out: of the version in use, and of the candidate."""

    before: float
    after: float
    num_texts: int

    @property
    def is_worth_publishing(self) -> bool:
        return self.after >= self.before


class Follower:
    """Follows one learning folder."""

    def __init__(
        self,
        folder: Path,
        decoder: Decoder,
        config: FollowConfig,
        *,
        drafter: Path | None = None,
        say: Say = print,
    ) -> None:
        """drafter: to start from while `folder` has no version. Raises ConfigError."""
        self._folder = folder
        self._own = folder / TRAINER
        self._lock = FolderLock(self._own, "trainer")
        self._decoder = decoder
        self._config = config
        self._fit = config.fit_config()
        self._given = drafter
        self._say = say
        self._intake = Intake(folder / BUFFER, self._own / "texts", config, say)
        self._round = self._step = 0
        self._in_round = False
        self._base: str | None = None
        self._shards: list[str] = []
        self._consumed: set[str] = set()
        self._start_from(current_version(folder))
        self._restore()

    def run(self, *, poll_s: float, once: bool = False) -> None:
        """Follow for ever; `once`: until nothing more is to be learnt from what is there."""
        while True:
            if self.turn():
                continue
            if once:
                return
            time.sleep(poll_s)

    def turn(self) -> bool:
        """Look at the buffer, and do a round if it is time; returns whether it did one."""
        if not self._in_round:
            self._intake.update(self._decoder, self.drafter.config.tap_layers)
            if not self._has_enough():
                return False
            self._begin_round()
        self._run_round()
        return True

    def close(self) -> None:
        self._lock.release()

    def _has_enough(self) -> bool:
        names = set(self._intake.names)
        new, everything = self._intake.size(names - self._consumed), self._intake.size(names)
        return (
            new.num_train >= self._config.min_new_texts
            and everything.num_held_out >= self._config.min_held_out
        )

    def _begin_round(self) -> None:
        version = current_version(self._folder)
        if version != self._base:  # somebody else's
            self._start_from(version)
        self._round, self._step, self._in_round = self._round + 1, 0, True
        self._shards = self._intake.names
        self._save()

    def _run_round(self) -> None:
        started_s = time.monotonic()
        store = TextStore([self._intake.folder], self.drafter.config.tap_layers)
        self._train(store)
        version = self._published_already()
        judged = None
        if version is None:
            judged = self._judge([store.text(index) for index in self._held_out(store)])
            if judged.is_worth_publishing:
                version = self._publish(judged)
        self._log(
            {
                "round": self._round,
                "base": self._base,
                "texts": len(store),
                "shards": len(self._shards),
                "judged": None if judged is None else asdict(judged),
                "published": version,
                "s": round(time.monotonic() - started_s, 1),
            }
        )
        self._say(_verdict(self._round, judged, version))
        self._end_round(version)

    def _train(self, store: TextStore) -> None:
        """The rest of the round's steps; saved now and then, and at the end."""
        batches = FollowBatches(store, self._older(), self.drafter.config.widths, self._config)
        saved_s = time.monotonic()
        while self._step < self._config.steps_per_round:
            figures = self._train_step(batches)
            if self._step % LOG_EVERY == 0:
                self._log({"round": self._round, "step": self._step, **asdict(figures)})
            if time.monotonic() - saved_s >= self._config.save_every_s:
                self._save()
                saved_s = time.monotonic()
        self._save()

    def _train_step(self, batches: FollowBatches) -> Figures:
        batch = batches.batch(self._round, self._step)
        seed = (self._config.seed * 10_007 + self._round) * 1_000_003 + self._step
        generator = torch.Generator().manual_seed(seed)
        self.drafter.train()
        loss, figures = training_loss(
            self.drafter, self._ends, batch, self._config.losses, generator
        )
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.drafter.parameters(), self._config.max_norm)
        rate = learning_rate(self._step, self._fit)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return figures

    def _older(self) -> TextStore | None:
        folders = [Path(folder) for folder in self._config.data]
        taps = self.drafter.config.tap_layers
        for folder in folders:
            for _ in ensure_features(folder, self._decoder, taps):
                pass
        return TextStore(folders, taps) if folders else None

    def _held_out(self, store: TextStore) -> list[int]:
        """The newest ones."""
        return split(store, self._config.held_out_share)[1][-self._config.evaluate_texts :]

    def _judge(self, texts: Sequence[Text]) -> Judgement:
        """The candidate as it will be served: written, and read again."""
        candidate = self._own / CANDIDATE
        shutil.rmtree(candidate, ignore_errors=True)
        save_drafter(self.drafter, candidate)
        lengths = [
            evaluate(self._load(path).eval(), self._ends, texts).accepted_length
            for path in (self._checkpoint_of(self._base), candidate)
        ]
        return Judgement(lengths[0], lengths[1], len(texts))

    def _publish(self, judged: Judgement) -> str:
        about = {"round": self._round, "base": self._base, **asdict(judged)}

        def fill(folder: Path) -> None:
            shutil.copytree(self._own / CANDIDATE, folder, dirs_exist_ok=True)
            (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")

        return publish(self._folder, fill, keep=self._config.keep_versions)

    def _published_already(self) -> str | None:
        """The version that this round made before it was killed, if it got so far."""
        version = current_version(self._folder)
        if version is None or version == self._base:
            return None
        try:
            about = read_json(version_folder(self._folder, version) / ABOUT)
        except CheckpointError:
            return None
        is_ours = (about.get("round"), about.get("base")) == (self._round, self._base)
        return version if is_ours else None

    def _end_round(self, version: str | None) -> None:
        if version is None:
            self._start_from(self._base)
        else:
            self._base = version
        self._consumed = set(self._shards)  # older ones have left the window for good
        self._shards, self._in_round = [], False
        self._save()

    def _start_from(self, version: str | None) -> None:
        """The weights of a version, and fresh optimisers."""
        self._base = version
        self.drafter = self._load(self._checkpoint_of(version))
        if self.drafter.survival_head is None:
            raise ConfigError("only drafters with a survival head can be trained")
        token_ids = self.drafter.token_ids
        if token_ids is None:
            token_ids = torch.arange(self._decoder.config.vocab_size)
        self._ends = TargetEnds.of(self._decoder, token_ids)
        self._optimizers = optimizers_of(self.drafter, self._fit)

    def _checkpoint_of(self, version: str | None) -> Path:
        if version is not None:
            return version_folder(self._folder, version)
        if self._given is None:
            raise ConfigError(f"{self._folder} has no version yet: give a drafter to start from")
        return self._given

    def _load(self, checkpoint: Path) -> Drafter:
        drafter = load_drafter(checkpoint, self._decoder.config, torch.float32, CPU)
        return drafter.requires_grad_(True)

    def _save(self) -> None:
        state = State(
            round=self._round,
            step=self._step,
            in_round=self._in_round,
            base=self._base,
            shards=self._shards,
            consumed=sorted(self._consumed),
            drafter=self.drafter.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in self._optimizers],
        )
        scratch = self._own / f".{STATE}"
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._own / STATE)

    def _restore(self) -> None:
        path = self._own / STATE
        if not path.exists():
            return
        state: State = torch.load(path, weights_only=True)
        self._round, self._consumed = state["round"], set(state["consumed"])
        if not state["in_round"] and state["base"] != self._base:
            return  # another version is in use by now, and training starts from that
        self._step, self._in_round = state["step"], state["in_round"]
        self._base, self._shards = state["base"], state["shards"]
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _log(self, entry: dict[str, object]) -> None:
        line = json.dumps({"time": round(time.time(), 1), **entry})
        with (self._own / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _verdict(number: int, judged: Judgement | None, version: str | None) -> str:
    if judged is None:
        return f"round {number}: version {version} was published before"
    lengths = f"accepted length {judged.before:.3f}, then {judged.after:.3f}"
    end = f"version {version}" if version is not None else "not published"
    return f"round {number}: {lengths} on {judged.num_texts} texts held out: {end}"
