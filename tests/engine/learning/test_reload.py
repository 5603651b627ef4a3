"""A newer drafter is taken up between two steps: no text changes, and what is broken is refused."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from adaflash.engine.build import build_engine
from adaflash.engine.config import EngineConfig, LearnConfig, SpeculationConfig, parse_policy
from adaflash.engine.engine import Engine
from adaflash.engine.errors import CheckpointError
from adaflash.engine.learning import reload
from adaflash.engine.learning.versions import CURRENT, publish
from adaflash.engine.messages import LearningReport
from adaflash.engine.pages import PagePool
from adaflash.engine.speculation.block_drafter import BlockDrafter
from adaflash.engine.trajectories import read_shards
from adaflash.engine.types import Request, SamplingParams
from tests.engine.toy import request
from tests.tiny_drafter import (
    MASK,
    TAPS,
    drafter_config,
    drafter_tensors,
    survival_head_tensors,
    write_tiny_drafter,
)
from tests.tiny_model import VOCAB, write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reload, "LOOK_EVERY_S", 0.0)
        patch.setattr("adaflash.engine.learning.learning.REPORT_EVERY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny model, a drafter, and the costs once they are measured."""
    folder = tmp_path_factory.mktemp("reload")
    write_tiny_model(folder / "model")
    write(folder / "drafter", seed=0)
    return folder


def write(folder: Path, seed: int, block_size: int = 8, **tensors: Tensor) -> None:
    dflash = {"mask_token_id": MASK, "target_layer_ids": TAPS, "widths": [2, 4]}
    config = drafter_config(block_size=block_size, dflash_config=dflash)
    heads = survival_head_tensors(seed=seed + 50, block_size=block_size)
    vocabulary = {"draft_token_ids": torch.arange(seed, VOCAB - 10 + seed)}
    write_tiny_drafter(folder, config, drafter_tensors(seed=seed) | heads | vocabulary | tensors)


def build(home: Path, policy: str | None, **changes: object) -> Engine:
    """policy: None for plain decoding."""
    kind, length = parse_policy(policy or "off")
    config = EngineConfig(
        model_path=str(home / "model"),
        dtype="float32",
        num_threads=1,
        max_num_seqs=6,
        max_batched_tokens=64,
        max_model_len=256,
        kv_cache_gib=0.01,
        drafter_path=None if policy is None else str(home / "drafter"),
        speculation=SpeculationConfig(policy=kind, fixed_length=length, lookup_drafts=0),
        cost_dir=str(home / "costs"),
    )
    return build_engine(msgspec.structs.replace(config, **changes))[0]


def requests() -> list[Request]:
    return [
        request(
            f"r{n}",
            [100, 101, 102, 103, *range(n + 1)] * 3,
            SamplingParams(seed=n, max_tokens=60, temperature=n % 2 * 0.8, ignore_eos=True),
        )
        for n in range(5)
    ]


def serve(engine: Engine, versions: dict[int, Path], learn: Path) -> dict[str, list[int]]:
    """All requests at once; before some steps, a version is published and taken up."""
    for item in requests():
        engine.add(item)
    written: dict[str, list[int]] = {item.request_id: [] for item in requests()}
    step = 0
    while engine.has_work:
        if step in versions:
            publish(learn, copying(versions[step]), keep=3)
            until_news(engine)
        for delta in engine.step().deltas:
            written[delta.request_id] += delta.token_ids
        engine.turn()
        engine.check_integrity()
        step += 1
    assert step > max(versions, default=0), "it ended before the last version"
    return written


class copying:
    """Fills a version with another folder's files."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __call__(self, folder: Path) -> None:
        for path in self._source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())


def until_news(engine: Engine) -> LearningReport:
    """Turn until a version is taken up or refused."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        report = engine.turn()
        if report is not None and report.num_reloads + report.num_refused:
            return report
        time.sleep(0.005)
    raise TimeoutError("nothing became of the version")


def source_of(engine: Engine) -> BlockDrafter:
    source = engine._parts.drafter
    assert isinstance(source, BlockDrafter)
    return source


@pytest.fixture(scope="module")
def plain(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return serve(build(home, None), {}, tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize("policy", ["fixed:7", "fixed:2", "goodput"])
def test_reloading_in_the_middle_changes_no_token(
    home: Path, tmp_path: Path, plain: dict[str, list[int]], policy: str
) -> None:
    for seed in (1, 2):
        write(tmp_path / f"v{seed}", seed)
    engine = build(home, policy, learn=LearnConfig(folder=str(tmp_path / "learn")))
    before = engine._parts.budget
    versions = {4: tmp_path / "v1", 15: tmp_path / "v2"}
    assert serve(engine, versions, tmp_path / "learn") == plain
    assert engine._parts.budget is not before, "what was learnt of the old one is forgotten"
    source = source_of(engine)
    expected = drafter_tensors(seed=2)["fc.weight"]
    assert torch.equal(source._drafter.fc.weight, expected)
    assert torch.equal(source._drafter.token_ids, torch.arange(2, VOCAB - 8))  # type: ignore[arg-type]
    engine.close()
    kept = list(read_shards(tmp_path / "learn" / "buffer"))
    answers = {(*item.prompt_ids, *plain[item.request_id]) for item in requests()}
    assert {item.token_ids for item in kept} == answers
    assert any(item.rejected for item in kept)
    for item in kept:
        places = item.rejected
        assert list(places) == sorted(set(places))
        assert all(item.prompt_len < place < len(item.token_ids) for place in places)


def test_a_new_drafter_drafts_as_if_it_had_been_there_from_the_start(
    home: Path, tmp_path: Path
) -> None:
    """Also behind a prompt whose pages the old one has filled.

    With two tokens to choose from about half of the drafts are right; which, depends on context.
    """
    write(tmp_path / "new", seed=3)
    coin = SamplingParams(
        seed=1, max_tokens=60, temperature=4.0, logit_bias={20: 100.0, 21: 100.0}, ignore_eos=True
    )
    asked = request("coin", list(range(50, 90)), coin)
    changed = build(home, "fixed:7", learn=LearnConfig(folder=str(tmp_path / "learn")))
    drafts_of(changed, asked)
    publish(tmp_path / "learn", copying(tmp_path / "new"), keep=3)
    assert until_news(changed).version == "000001"
    fresh = build(home, "fixed:7", drafter_path=str(tmp_path / "new"))
    expected = drafts_of(fresh, asked)
    assert any(accepted for _, accepted in expected)
    assert drafts_of(changed, asked) == expected


def drafts_of(engine: Engine, asked: Request) -> list[tuple[int | None, int]]:
    engine.add(asked)
    found = []
    while engine.has_work:
        found += [(delta.num_drafts, delta.num_accepted) for delta in engine.step().deltas]
    return found


def test_broken_and_alien_versions_are_refused(home: Path, tmp_path: Path) -> None:
    learn = tmp_path / "learn"
    engine = build(home, "fixed:7", learn=LearnConfig(folder=str(learn)))
    source = source_of(engine)
    old = source._drafter
    write(tmp_path / "good", seed=4)
    write(tmp_path / "wide", seed=4, block_size=6)
    write(tmp_path / "more", seed=4, more=torch.zeros(3))
    write(tmp_path / "short", seed=4)
    torn = (tmp_path / "short" / "model.safetensors").read_bytes()
    (tmp_path / "short" / "model.safetensors").write_bytes(torn[: len(torn) // 2])
    for name, problem in (
        ("wide", "another shape"),
        ("more", "no known use"),
        ("short", "cannot read"),
    ):
        publish(learn, copying(tmp_path / name), keep=3)
        report = until_news(engine)
        assert (report.num_refused, report.num_reloads, report.version) == (1, 0, None)
        assert problem in report.problems[0]
        assert source._drafter is old
    (learn / CURRENT).write_text("../../secret")
    assert "names no version" in until_news(engine).problems[0]
    publish(learn, copying(tmp_path / "good"), keep=3)
    assert until_news(engine).version == "000004"
    assert source._drafter is not old


def test_a_learning_folder_is_a_drafter(home: Path, tmp_path: Path) -> None:
    for seed in (5, 6):
        write(tmp_path / f"v{seed}", seed)
    publish(tmp_path / "learn", copying(tmp_path / "v5"), keep=3)
    engine = build(home, "fixed:7", drafter_path=str(tmp_path / "learn"))
    expected = drafter_tensors(seed=5)["fc.weight"]
    assert torch.equal(source_of(engine)._drafter.fc.weight, expected)
    publish(tmp_path / "learn", copying(tmp_path / "v6"), keep=3)
    assert until_news(engine).version == "000002"


def test_with_learning_the_newest_version_is_in_use_from_the_start(
    home: Path, tmp_path: Path
) -> None:
    write(tmp_path / "v7", seed=7)
    learn = LearnConfig(folder=str(tmp_path / "learn"))
    publish(tmp_path / "learn", copying(tmp_path / "v7"), keep=3)
    expected = drafter_tensors(seed=7)["fc.weight"]
    for drafter_path in (str(home / "drafter"), None):
        engine = build(home, "fixed:7", drafter_path=drafter_path, learn=learn)
        assert torch.equal(source_of(engine)._drafter.fc.weight, expected)
        report = engine.turn()
        assert report is not None
        assert report.version == "000001"
        engine.close()


def test_a_pointer_to_nothing_stops_the_start_only_without_another_drafter(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn" / CURRENT).write_text("000007\n")
    learn = LearnConfig(folder=str(tmp_path / "learn"))
    engine = build(home, "fixed:7", learn=learn)
    report = engine.turn()
    assert report is not None
    assert report.num_refused == 1
    engine.close()
    with pytest.raises(CheckpointError):
        build(home, "fixed:7", drafter_path=str(tmp_path / "learn"))


def test_forgotten_pages_are_free() -> None:
    pool = PagePool(8, page_size=4)
    held, cached = pool.allocate(2), pool.allocate(2)
    for number, page in enumerate(held + cached):
        pool.publish(page, bytes([number]))
    pool.release(cached)
    pool.forget()
    pool.check_integrity([held])
    assert pool.num_available == 6
    assert pool.match([bytes([0])]) == []
    pool.release(held)
    pool.check_integrity([])
    assert len(pool.allocate(8)) == 8
