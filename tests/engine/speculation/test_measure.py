"""The first measurement of costs, on real parts: it works on every pool there can be."""

from pathlib import Path

import pytest

from adaflash.engine.build import build_engine
from adaflash.engine.config import EngineConfig
from adaflash.engine.types import SamplingParams
from tests.engine.toy import request, run, text
from tests.tiny_drafter import write_tiny_drafter
from tests.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("max_model_len", "page_size"), [(8, 16), (8, 4), (4, 1), (40, 16), (200, 16)]
)
@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_pool_of_a_few_tokens_starts_and_serves(
    tmp_path: Path, max_model_len: int, page_size: int, with_drafter: bool
) -> None:
    drafter = str(write_tiny_drafter(tmp_path / "drafter")) if with_drafter else None
    engine, _ = build_engine(
        EngineConfig(
            model_path=str(write_tiny_model(tmp_path / "model")),
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=1,
            max_batched_tokens=16,
            page_size=page_size,
            num_threads=1,
            drafter_path=drafter,
        )
    )
    sampling = SamplingParams(seed=0, max_tokens=3, temperature=0, ignore_eos=True)
    assert len(text(run(engine, [request("a", [5], sampling)])["a"])) == 3
