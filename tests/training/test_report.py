"""`adaflash evaluate`: a table, JSON and a plot of a drafter's figures."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from adaflash.engine.trajectories import write_shard
from adaflash.training.cli import evaluate
from adaflash.training.config import DrafterShape
from adaflash.training.new_drafter import new_drafter, save_drafter
from tests.tiny_model import VOCAB
from tests.training.tiny_training import TAPS, random_texts, tiny_decoder


def test_a_drafter_is_judged_by_domain_and_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = tiny_decoder(tmp_path)
    shape = DrafterShape(taps=TAPS, vocab_size=VOCAB, head_size=8, chain_size=None)
    drafter = new_drafter(decoder.config, shape, torch.arange(VOCAB), seed=1)
    save_drafter(drafter, tmp_path / "drafter", torch.float32)
    write_shard(tmp_path / "texts", random_texts(5))
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    target = ["--target", str(tmp_path / "model")]
    evaluate([str(tmp_path / "drafter"), str(tmp_path / "texts"), *target, *files])
    shown = capsys.readouterr().out
    assert "maths" in shown
    assert "all" in shown
    found = json.loads((tmp_path / "out.json").read_text())["0"]
    assert found["domains"]["maths"]["texts"] == 3
    assert len(found["domains"]["chat"]["conditional"]) == 7
    assert found["accepted_length"] >= 1
    lines = ET.parse(tmp_path / "out.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 2
