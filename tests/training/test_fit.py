"""The loop on a toy: it learns, and a killed run goes on with the same losses."""

from pathlib import Path

import msgspec
import pytest
import torch

from adaflash.engine.errors import ConfigError
from adaflash.engine.models.weights import load_drafter
from adaflash.engine.trajectories import Trajectory
from adaflash.engine.types import SamplingParams
from adaflash.training.config import DrafterShape, FitConfig, Losses, read_fit_config
from adaflash.training.data import some_texts
from adaflash.training.fit import Data, Trainer, learning_rate
from tests.engine.scripted import real_engine
from tests.engine.toy import request, run, text
from tests.tiny_model import EOS, VOCAB, write_tiny_model
from tests.training.tiny_training import TAPS, store_of, tiny_decoder

SHAPE = DrafterShape(
    num_layers=1, taps=TAPS, widths=(3, 8), vocab_size=VOCAB, head_size=8, chain_size=24
)


def written_texts(folder: Path, count: int) -> list[Trajectory]:
    """What the tiny model itself writes, greedily."""
    sampling = SamplingParams(seed=0, max_tokens=36, temperature=0.0, ignore_eos=True)
    asked = [request(f"t{n}", [n, 2 * n, 5], sampling) for n in range(count)]
    deltas = run(real_engine(write_tiny_model(folder / "model")).engine, asked)
    return [
        Trajectory(item.request_id, "d", (*item.prompt_ids, *text(deltas[item.request_id])), 3)
        for item in asked
    ]


def config(**changes: object) -> FitConfig:
    base = FitConfig(
        data=[],
        held_out=[],
        drafter=SHAPE,
        steps=60,
        texts_per_step=4,
        anchors_per_text=8,
        evaluate_every=1000,
        matrix_lr=0.01,
    )
    return msgspec.structs.replace(base, **changes)


def trainer(folder: Path, how: FitConfig) -> Trainer:
    decoder = tiny_decoder(folder)
    store = store_of(folder / "texts", decoder, written_texts(folder, 6))
    return Trainer(how, decoder, Data(store, some_texts(store, 3)), folder / "run")


def test_it_learns_and_what_it_saves_is_a_drafter(tmp_path: Path) -> None:
    under_test = trainer(tmp_path, config())
    first = under_test.train_step().cross_entropy
    before = under_test.judge().accepted_length
    lines: list[str] = []
    under_test.run(lines.append)
    assert under_test.train_step().cross_entropy < 0.5 * first
    after = under_test.judge()
    assert after.accepted_length > before + 0.5
    assert "accepted length" in lines[-1]
    decoder = tiny_decoder(tmp_path)
    saved = load_drafter(
        tmp_path / "run" / "drafter", decoder.config, torch.float32, torch.device("cpu")
    )
    assert saved.config.widths == (3, 8)
    assert saved.token_ids is not None
    assert EOS in saved.token_ids.tolist()


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "a", config())
    losses = [whole.train_step().loss for _ in range(12)]
    cut = trainer(tmp_path / "b", config())
    for _ in range(7):
        cut.train_step()
    cut.save()
    cut.train_step()  # lost
    again = trainer(tmp_path / "b", config())
    assert again.step == 7
    assert [again.train_step().loss for _ in range(5)] == losses[7:]


@pytest.mark.parametrize("changes", [{"losses": Losses(reverse_kl=0.2)}, {"max_text_tokens": 20}])
def test_other_settings_train_too(tmp_path: Path, changes: dict[str, object]) -> None:
    under_test = trainer(tmp_path, config(**changes))
    figures = [under_test.train_step() for _ in range(40)]
    assert figures[-1].cross_entropy < figures[0].cross_entropy


def test_the_rate_rises_stays_and_falls() -> None:
    how = config(steps=100, warmup=0.1, decay=0.2)
    rates = [learning_rate(step, how) for step in range(100)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[10:80] == [1.0] * 70
    assert rates[99] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "text",
    [
        "data: [a]\n",
        "data: [a]\nheld_out: [b]\nunknown: 1\n",
        "data: [a]\nheld_out: [b]\ndrafter: {widths: [4, 9]}\n",
        "data: [a]\nheld_out: [b]\ndrafter: {widths: []}\n",
        "- a\n",
        "{",
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fit.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"fit\.yaml|widths"):
        read_fit_config(path)
