"""On-policy rounds on a tiny model: they teach, can be killed, and publish nothing worse."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from adaflash.engine.errors import ConfigError
from adaflash.engine.learning.versions import CURRENT, current_version, version_folder
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.weights import load_drafter
from adaflash.engine.trajectories import PATTERN, Trajectory, read_shards, write_shard
from adaflash.engine.types import SamplingParams
from adaflash.training.config import DrafterShape
from adaflash.training.follow import Follower, Judgement
from adaflash.training.follow_config import FollowConfig, read_follow_config
from adaflash.training.intake import is_held_out
from adaflash.training.new_drafter import new_drafter, save_drafter
from adaflash.training.objective import training_loss
from tests.engine.scripted import real_engine
from tests.engine.toy import request, run, text
from tests.tiny_model import VOCAB
from tests.training.tiny_training import TAPS, tiny_decoder

STEPS = 40
CONFIG = FollowConfig(
    min_new_texts=10,
    held_out_share=0.3,
    min_held_out=2,
    steps_per_round=STEPS,
    texts_per_step=4,
    anchors_per_text=8,
    matrix_lr=1e-2,
    vector_lr=1e-2,
    save_every_s=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny model and a fresh drafter."""
    folder = tmp_path_factory.mktemp("follow")
    decoder = tiny_decoder(folder)
    shape = DrafterShape(taps=TAPS, widths=(4, 8), vocab_size=VOCAB, head_size=8, chain_size=16)
    drafter = new_drafter(decoder.config, shape, torch.arange(VOCAB), seed=1)
    save_drafter(drafter, folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def decoder(home: Path) -> Decoder:
    return tiny_decoder(home)


@pytest.fixture(scope="module")
def served(home: Path) -> list[Trajectory]:
    """What the tiny model says, which soon repeats itself."""
    engine = real_engine(home / "model").engine
    sampling = SamplingParams(seed=0, max_tokens=40, temperature=0.0, ignore_eos=True)
    asked = [request(f"p{n}", [n, 2 * n, 50 + n], sampling) for n in range(40)]
    answers = [text(run(engine, [item])[item.request_id]) for item in asked]
    return [
        Trajectory(f"{item.request_id}#0", "served", (*item.prompt_ids, *answer), 3, (5, 9, 20))
        for item, answer in zip(asked, answers, strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path, served: list[Trajectory]) -> Path:
    """A learning folder with texts and no version."""
    write_shard(tmp_path / "learn" / "buffer", served[:20], first_number=1000)
    write_shard(tmp_path / "learn" / "buffer", served[20:])
    return tmp_path / "learn"


def follower(folder: Path, home: Path, decoder: Decoder, **changes: object) -> Follower:
    config = msgspec.structs.replace(CONFIG, **changes)
    return Follower(folder, decoder, config, drafter=home / "drafter", say=lambda line: None)


def log_of(folder: Path) -> list[dict[str, object]]:
    """Lines that tell of whole rounds."""
    lines = (folder / "trainer" / "log.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if "judged" in entry]


def published(folder: Path, decoder: Decoder, name: str) -> Drafter:
    path = version_folder(folder, name)
    return load_drafter(path, decoder.config, torch.float32, torch.device("cpu"))


def test_rounds_teach_and_publish(folder: Path, home: Path, decoder: Decoder) -> None:
    under_test = follower(folder, home, decoder, steps_per_round=60)
    under_test.run(poll_s=0, once=True)
    assert current_version(folder) == "000001"
    (entry,) = log_of(folder)
    judged = entry["judged"]
    assert isinstance(judged, dict)
    assert judged["after"] > judged["before"] + 0.2
    assert entry["published"] == "000001"
    published(folder, decoder, "000001")
    assert not under_test.turn(), "nothing new is there"
    assert len(list((folder / "buffer").glob(PATTERN))) == 2, "the buffer is the server's"


def test_it_goes_on_from_what_it_published(
    folder: Path, home: Path, decoder: Decoder, served: list[Trajectory]
) -> None:
    first = follower(folder, home, decoder, min_new_texts=5)
    first.run(poll_s=0, once=True)
    first.close()
    write_shard(folder / "buffer", [msgspec_renamed(item) for item in served[:15]])
    second = follower(folder, home, decoder, min_new_texts=5)
    second.run(poll_s=0, once=True)
    rounds = log_of(folder)
    assert [entry["round"] for entry in rounds] == [1, 2]
    assert rounds[1]["base"] == rounds[0]["published"]


def msgspec_renamed(item: Trajectory) -> Trajectory:
    return Trajectory(
        item.name.replace("#0", "#1"), item.domain, item.token_ids, item.prompt_len, item.rejected
    )


class Killed(Exception):
    pass


def killing(at: int) -> Callable[[Follower], None]:
    """A `_save` that works, and dies after the call number `at`."""
    calls = 0
    save = Follower._save

    def dying(self: Follower) -> None:
        nonlocal calls
        save(self)
        calls += 1
        if calls == at:
            raise Killed

    return dying


@pytest.mark.parametrize("at", [1, 5, STEPS + 2, STEPS + 3])
def test_killed_and_started_again_it_comes_to_the_same(
    tmp_path: Path,
    folder: Path,
    home: Path,
    decoder: Decoder,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the round's beginning, in it, before the judgement, and after publishing."""
    write_shard(tmp_path / "other" / "buffer", list(read_shards(folder / "buffer")))
    straight = follower(tmp_path / "other", home, decoder)
    straight.run(poll_s=0, once=True)
    with monkeypatch.context() as patch:
        patch.setattr(Follower, "_save", killing(at))
        broken = follower(folder, home, decoder)
        with pytest.raises(Killed):
            broken.run(poll_s=0, once=True)
        broken.close()
    again = follower(folder, home, decoder)
    again.run(poll_s=0, once=True)
    assert current_version(folder) == current_version(tmp_path / "other") == "000001"
    for name, tensor in straight.drafter.state_dict().items():
        assert torch.equal(tensor, again.drafter.state_dict()[name]), name


def test_killed_behind_the_publication_it_does_not_publish_twice(
    folder: Path, home: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Follower, version: str | None) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "_end_round", die)
        broken = follower(folder, home, decoder)
        with pytest.raises(Killed):
            broken.run(poll_s=0, once=True)
        broken.close()
    assert current_version(folder) == "000001"
    again = follower(folder, home, decoder)
    again.run(poll_s=0, once=True)
    assert current_version(folder) == "000001"
    assert not again.turn()


def test_a_worse_drafter_is_not_published(
    folder: Path, home: Path, decoder: Decoder, served: list[Trajectory]
) -> None:
    """It goes back to the version in use, which has learnt something worth losing."""
    good = follower(folder, home, decoder, steps_per_round=60)
    good.run(poll_s=0, once=True)
    kept = {name: tensor.bfloat16() for name, tensor in good.drafter.state_dict().items()}
    good.close()
    write_shard(folder / "buffer", [msgspec_renamed(item) for item in served])
    ruined = follower(folder, home, decoder, matrix_lr=10.0, vector_lr=10.0)
    assert ruined.turn()
    assert current_version(folder) == "000001"
    entry = log_of(folder)[-1]
    assert entry["published"] is None
    judged = entry["judged"]
    assert isinstance(judged, dict)
    assert judged["after"] < judged["before"]
    for name, tensor in ruined.drafter.state_dict().items():
        if "survival_head" not in name:
            assert torch.equal(tensor.bfloat16(), kept[name]), name
    assert not ruined.turn(), "the same texts are not tried again"


def test_the_gate() -> None:
    assert Judgement(2.0, 2.0, 9).is_worth_publishing
    assert not Judgement(2.0, 1.99, 9).is_worth_publishing


def test_a_version_of_somebody_else_s_is_the_new_start(
    folder: Path, home: Path, decoder: Decoder, served: list[Trajectory]
) -> None:
    first = follower(folder, home, decoder)
    first.run(poll_s=0, once=True)
    save_drafter(first.drafter, folder / "versions" / "000009")
    (folder / CURRENT).write_text("000009\n")
    write_shard(folder / "buffer", [msgspec_renamed(item) for item in served])
    assert first.turn()
    assert log_of(folder)[-1]["base"] == "000009"


def test_held_out_prompts_are_never_trained_on(
    folder: Path, home: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[str]()

    def watching(*args: object) -> object:
        seen.update(names_of(args[2]))
        return training_loss(*args)  # type: ignore[arg-type]

    by_tokens = {item.token_ids[:20]: item.name for item in read_shards(folder / "buffer")}

    def names_of(batch: object) -> set[str]:
        return {by_tokens[tuple(row[:20].tolist())] for row in batch.token_ids}  # type: ignore[attr-defined]

    monkeypatch.setattr("adaflash.training.follow.training_loss", watching)
    follower(folder, home, decoder).run(poll_s=0, once=True)
    assert len(seen) > 10
    assert not any(is_held_out(name, CONFIG.held_out_share) for name in seen)


def test_older_texts_are_mixed_in(
    tmp_path: Path, folder: Path, home: Path, decoder: Decoder, served: list[Trajectory]
) -> None:
    older = [Trajectory(f"o{n}#0", "old", (1, 2, 3) * 8, 4) for n in range(4)]
    write_shard(tmp_path / "older", older)
    under_test = follower(folder, home, decoder, data=[str(tmp_path / "older")], older_share=0.5)
    store = under_test._older()
    assert store is not None
    assert len(store) == 4
    assert under_test.turn()


def test_texts_that_the_server_deletes_go_here_too(
    folder: Path, home: Path, decoder: Decoder
) -> None:
    under_test = follower(folder, home, decoder)
    under_test.run(poll_s=0, once=True)
    for path in (folder / "buffer").glob(PATTERN):
        path.unlink()
    assert not under_test.turn()
    assert not list((folder / "trainer" / "texts").iterdir())


def test_a_damaged_shard_is_left_out(folder: Path, home: Path, decoder: Decoder) -> None:
    (folder / "buffer" / "shard-999999.safetensors").write_bytes(b"nonsense")
    follower(folder, home, decoder).run(poll_s=0, once=True)
    assert current_version(folder) == "000001"


def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, folder: Path, home: Path, decoder: Decoder
) -> None:
    with pytest.raises(ConfigError, match="has no version yet"):
        Follower(tmp_path / "empty", decoder, CONFIG)
    running = follower(folder, home, decoder)
    with pytest.raises(ConfigError, match="another trainer uses"):
        follower(folder, home, decoder)
    running.close()
    (tmp_path / "follow.yaml").write_text("older_share: 2")
    with pytest.raises(ConfigError, match="older_share must be between 0 and 1"):
        read_follow_config(tmp_path / "follow.yaml")
