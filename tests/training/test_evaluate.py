"""The evaluation foretells what the server accepts, greedy and sampled."""

from pathlib import Path

import pytest
import torch

from adaflash.engine.config import Policy, SpeculationConfig
from adaflash.engine.models.weights import load_drafter
from adaflash.engine.trajectories import Trajectory
from adaflash.engine.types import SamplingParams
from adaflash.training.config import DrafterShape
from adaflash.training.evaluate import DomainFigures, Evaluation, accepted_everywhere, walk
from adaflash.training.new_drafter import new_drafter, save_drafter
from adaflash.training.objective import TargetEnds
from tests.engine.scripted import RealSize, Speculating, real_engine
from tests.engine.toy import request, run, text
from tests.tiny_model import VOCAB
from tests.training.tiny_training import TAPS, store_of, tiny_decoder


def test_a_walk_skips_what_a_block_brought() -> None:
    assert list(walk([2, 9, 9, 0, 1, 9])) == [2, 0, 1]
    assert list(walk([0, 0, 0])) == [0, 0, 0]
    assert list(walk([7])) == [7]
    assert list(walk([])) == []


def test_figures_of_a_domain_by_hand() -> None:
    figures = DomainFigures()
    figures.add([0, 2, 1, 3], num_places=3)
    assert figures.accepted_length == pytest.approx(1 + 6 / 4)
    # Four blocks, three with the first draft right, two of these with the second, one with all.
    assert figures.conditional() == pytest.approx([3 / 4, 2 / 3, 1 / 2])


def test_the_calibration_error_is_the_mean_distance_of_its_bins() -> None:
    found = Evaluation(bins=[[10.0, 2.0, 3.0], [30.0, 20.0, 14.0]])
    assert found.calibration_error == pytest.approx((1 + 6) / 40)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("chain_size", [None, 24])
def test_it_foretells_what_the_server_accepts(
    tmp_path: Path, temperature: float, chain_size: int | None
) -> None:
    decoder = tiny_decoder(tmp_path)
    # Two tokens are all that the drafter knows; the target is held to the same two.
    shape = DrafterShape(taps=TAPS, vocab_size=2, head_size=8, chain_size=chain_size)
    made = new_drafter(decoder.config, shape, torch.tensor([20, 21]), seed=3)
    if made.chain_head is not None:
        made.chain_head.out.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    save_drafter(made, tmp_path / "drafter", torch.float32)
    sampling = SamplingParams(
        seed=11,
        max_tokens=60,
        temperature=temperature,
        logit_bias=dict.fromkeys(set(range(VOCAB)) - {20, 21}, -100.0),
        ignore_eos=True,
    )
    asked = request("a", list(range(30, 50)), sampling)
    config = SpeculationConfig(policy=Policy.FIXED, fixed_length=7, lookup_drafts=0)
    served = real_engine(
        tmp_path / "model", RealSize(num_pages=200), Speculating(tmp_path / "drafter", config)
    )
    deltas = run(served.engine, [asked])["a"]
    seen = [delta.num_accepted for delta in deltas if delta.num_drafts == 7]
    trajectory = Trajectory(
        "a", "d", (*asked.prompt_ids, *text(deltas)), 20, temperature=temperature, seed=11
    )
    (found,) = [store_of(tmp_path / "texts", decoder, [trajectory]).text(0)]
    drafter = load_drafter(tmp_path / "drafter", decoder.config, torch.float32, torch.device("cpu"))
    ends = TargetEnds.of(decoder, torch.tensor([20, 21]))
    with torch.inference_mode():
        counts = accepted_everywhere(drafter, ends, found).counts
    foretold = list(walk(counts.tolist()))
    assert foretold[: len(seen)] == seen
    assert len(seen) >= 8
    assert len(set(seen)) > 1
