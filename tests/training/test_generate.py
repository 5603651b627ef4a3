"""The target's answers: what the engine emits, once each, also when it is stopped half way."""

from pathlib import Path

import pytest

from adaflash.engine.build import build_engine
from adaflash.engine.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.trajectories import Trajectory, read_shards
from adaflash.engine.types import SamplingParams
from adaflash.server.tokenizer import Tokenizer, load_tokenizer
from adaflash.training.generate import GenerateOptions, generate
from adaflash.training.prompts import Prompt
from tests.engine.toy import request, run, text
from tests.tiny_model import write_tiny_model

PROMPTS = [Prompt(f"p{n}", "d", ({"role": "user", "content": "x" * n},)) for n in range(1, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def engine(model: Path) -> Engine:
    return build_engine(
        EngineConfig(
            model_path=str(model),
            dtype="float32",
            kv_cache_gib=0.01,
            max_model_len=256,
            num_threads=1,
        )
    )[0]


def options(out: Path, **changes: object) -> GenerateOptions:
    given: dict[str, object] = {
        "out": out,
        "max_tokens": 9,
        "max_prompt_tokens": 100,
        "temperature": 0.0,
        "num_samples": 1,
        "in_flight": 3,
        "shard_size": 2,
    }
    return GenerateOptions(**(given | changes))  # type: ignore[arg-type]


def answers(model: Path, how: GenerateOptions) -> dict[str, Trajectory]:
    tokenizer: Tokenizer = load_tokenizer(model)
    steps = list(generate(engine(model), tokenizer, PROMPTS, how))
    assert steps[-1].num_done == steps[-1].num_total
    found = list(read_shards(how.out))
    assert len({item.name for item in found}) == len(found)
    return {item.name: item for item in found}


def test_answers_are_what_the_engine_writes(model: Path, tmp_path: Path) -> None:
    found = answers(model, options(tmp_path))
    assert len(found) == len(PROMPTS)
    tokenizer = load_tokenizer(model)
    greedy = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    for prompt in PROMPTS:
        ids = prompt.token_ids(tokenizer)
        alone = text(run(engine(model), [request("a", ids, greedy)])["a"])
        item = found[f"{prompt.prompt_id}#t0-0"]
        assert item.token_ids == (*ids, *alone)
        assert item.prompt_len == len(ids)


def test_a_stopped_run_goes_on_and_answers_nothing_twice(model: Path, tmp_path: Path) -> None:
    how = options(tmp_path / "cut", temperature=0.9, num_samples=2)
    running = generate(engine(model), load_tokenizer(model), PROMPTS, how)
    for _ in range(5):
        next(running)
    running.close()  # as a kill would: what is not in a shard yet is lost
    assert 0 < len(list(read_shards(how.out))) < 14
    cut = answers(model, how)
    whole = answers(model, options(tmp_path / "whole", temperature=0.9, num_samples=2))
    assert cut == whole
    assert whole["p3#t0.9-0"].token_ids != whole["p3#t0.9-1"].token_ids


def test_prompts_that_are_too_long_are_left_out(model: Path, tmp_path: Path) -> None:
    shortest = len(PROMPTS[0].token_ids(load_tokenizer(model)))
    found = answers(model, options(tmp_path, max_prompt_tokens=shortest + 2))
    assert sorted(found) == ["p1#t0-0", "p2#t0-0", "p3#t0-0"]
