"""What is written down of served texts, what is not, and that serving never waits for it."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from adaflash.engine.errors import ConfigError
from adaflash.engine.learning.buffer import Buffer
from adaflash.engine.learning.learning import Learning
from adaflash.engine.learning.recorder import Recorder, RecorderLimits, digest_of
from adaflash.engine.learning.redaction import Redact, find_hook
from adaflash.engine.messages import NotLearnt
from adaflash.engine.trajectories import PATTERN, Trajectory, read_shards
from adaflash.engine.types import Request, SamplingParams
from tests.engine.toy import request, run, text, toy_engine

MANY = 10**9
SAMPLING = SamplingParams(seed=1, max_tokens=12, temperature=0.7, ignore_eos=True)


def open_buffer(folder: Path, max_bytes: int = MANY, max_age_s: float = 3600.0) -> Buffer:
    return Buffer(folder, max_bytes=max_bytes, max_age_s=max_age_s)


@contextmanager
def recording(
    folder: Path,
    *,
    rate: float = 1.0,
    redact: Redact | None = None,
    limits: RecorderLimits = RecorderLimits(),  # noqa: B008 - frozen
) -> Iterator[Recorder]:
    recorder = Recorder(open_buffer(folder), rate=rate, redact=redact, limits=limits)
    try:
        yield recorder
    finally:
        recorder.close()


def serve(recorder: Recorder, asked: list[Request]) -> dict[str, list[int]]:
    """All at once through a toy engine; what was answered."""
    engine = toy_engine()
    engine.learning = Learning(recorder)
    return {name: text(deltas) for name, deltas in run(engine, asked).items()}


def some(count: int) -> list[Request]:
    return [request(f"r{number}", [number, 7, 8], SAMPLING) for number in range(1, count + 1)]


def left_out(recorder: Recorder) -> dict[NotLearnt, int]:
    return recorder.news().num_left_out


def test_finished_texts_are_written_when_it_ends(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        answers = serve(recorder, some(3))
        assert not list(tmp_path.glob(PATTERN))
    kept = list(read_shards(tmp_path))
    wanted = {(*asked.prompt_ids, *answers[asked.request_id]) for asked in some(3)}
    assert {item.token_ids for item in kept} == wanted
    assert {item.prompt_len for item in kept} == {3}
    how = (SAMPLING.temperature, SAMPLING.seed)
    assert {(item.temperature, item.seed) for item in kept} == {how}
    for item in kept:
        assert item.name.startswith(digest_of(item.token_ids[:3]) + "#")
    assert recorder.news().num_kept == 3
    assert recorder.news().num_kept == 0


def test_a_shard_is_written_when_it_is_full_or_has_waited(tmp_path: Path) -> None:
    limits = RecorderLimits(texts_per_shard=2, max_wait_s=0.2)
    with recording(tmp_path, limits=limits) as recorder:
        serve(recorder, some(3))
        wait_until(lambda: len(list(read_shards(tmp_path))) == 3)
        assert recorder.news().num_kept == 3  # before it was closed


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_aborted_and_refused_requests_are_not_written(tmp_path: Path) -> None:
    engine = toy_engine()
    with recording(tmp_path) as recorder:
        engine.learning = Learning(recorder)
        engine.add(request("gone", [3], SAMPLING))
        engine.add(request("refused", [], SAMPLING))
        engine.step()
        engine.abort("gone")
        while engine.has_work:
            engine.step()
    assert not list(tmp_path.glob(PATTERN))
    assert not recorder._rejected


def test_opting_out_and_sampling(tmp_path: Path) -> None:
    asked = some(4)
    asked[0] = msgspec.structs.replace(asked[0], may_learn=False)
    with recording(tmp_path / "all") as recorder:
        serve(recorder, asked)
        assert left_out(recorder) == {NotLearnt.OPT_OUT: 1}
    assert {item.token_ids[0] for item in read_shards(tmp_path / "all")} == {2, 3, 4}
    with recording(tmp_path / "none", rate=0.0) as recorder:
        serve(recorder, asked)
        assert left_out(recorder) == {NotLearnt.OPT_OUT: 1, NotLearnt.NOT_SAMPLED: 3}
    assert not list((tmp_path / "none").glob(PATTERN))


def test_the_hook_changes_and_drops_texts(tmp_path: Path) -> None:
    def redact(token_ids: list[int], prompt_len: int) -> list[int] | None:
        match token_ids[0]:
            case 1:
                return None
            case 2:
                raise RuntimeError("it does not know")
            case 3:
                return token_ids[1:]
        return [0] * prompt_len + token_ids[prompt_len:]

    with recording(tmp_path, redact=redact) as recorder:
        answers = serve(recorder, some(4))
    news = recorder.news()
    assert news.num_left_out == {NotLearnt.REDACTED: 1, NotLearnt.HOOK_FAILED: 2}
    assert news.num_kept == 1
    assert any("it does not know" in problem for problem in news.problems)
    (kept,) = read_shards(tmp_path)
    assert kept.token_ids == (0, 0, 0, *answers["r4"])
    assert kept.name.startswith(digest_of([0, 0, 0])), "the name must not tell what was there"


def test_hooks_are_found_or_refused() -> None:
    assert find_hook("os:getpid").__name__ == os.getpid.__name__
    for name in ("os.path", "os.path:nothing", "no_such_module:f", ":f", "os:name"):
        with pytest.raises(ConfigError):
            find_hook(name)


def test_texts_beyond_what_may_wait_are_left_out(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(token_ids: list[int], prompt_len: int) -> list[int]:
        entered.set()
        go_on.wait(10)
        return token_ids

    limits = RecorderLimits(texts_per_shard=1, max_waiting_tokens=40)  # two texts of 15
    with recording(tmp_path, redact=slow, limits=limits) as recorder:
        serve(recorder, some(1))
        assert entered.wait(10)
        started = time.monotonic()
        serve(recorder, some(6))
        assert time.monotonic() - started < 5, "serving waited for the writer"
        assert left_out(recorder) == {NotLearnt.QUEUE_FULL: 4}
        go_on.set()
    assert len(list(read_shards(tmp_path))) == 3


def test_a_disk_that_takes_nothing_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True

    def write(self: Buffer, texts: list[Trajectory]) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        original(self, texts)

    original = Buffer.write
    monkeypatch.setattr(Buffer, "write", write)
    limits = RecorderLimits(texts_per_shard=1)
    with recording(tmp_path, limits=limits) as recorder:
        for _ in range(2):
            serve(recorder, some(1))
            wait_until(lambda: not recorder._waiting)
        time.sleep(0.1)
        news = recorder.news()
        assert news.num_left_out == {NotLearnt.NOT_WRITTEN: 2}
        (problem,) = news.problems
        assert "No space left on device" in problem
        is_full = False
        serve(recorder, some(1))
    assert recorder.news().num_kept == 1


def texts(count: int) -> list[Trajectory]:
    return [Trajectory(f"t{number}", "d", (1,) * 1000, 3) for number in range(count)]


def test_the_oldest_shards_go_beyond_the_size(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_bytes=20_000)  # four shards of about 4.2 kB
    names = set()
    for _ in range(12):
        buffer.write(texts(1))
        there = sorted(path.name for path in tmp_path.glob(PATTERN))
        names |= set(there)
        assert sum(path.stat().st_size for path in tmp_path.glob(PATTERN)) == buffer.num_bytes
        assert buffer.num_bytes <= 20_000
        assert max(names) in there
    assert len(names) == 12
    assert len(there) == 4
    assert there == sorted(names)[-4:]


def test_old_shards_go_and_numbers_never_come_back(tmp_path: Path) -> None:
    now_s = time.time()
    buffer = Buffer(tmp_path, max_bytes=MANY, max_age_s=100, now_s=lambda: now_s)
    buffer.write(texts(1))
    (first,) = tmp_path.glob(PATTERN)
    now_s += 99
    assert buffer.bound() > 0
    now_s += 2
    assert buffer.bound() == 0
    assert not list(tmp_path.glob(PATTERN))
    buffer.close()
    buffer = Buffer(tmp_path, max_bytes=MANY, max_age_s=100, now_s=lambda: now_s)
    buffer.write(texts(1))
    (second,) = tmp_path.glob(PATTERN)
    assert second.name > first.name


def test_one_server_a_folder(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    assert (tmp_path / "buffer").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another server uses"):
        open_buffer(tmp_path / "buffer")
    buffer.close()
    open_buffer(tmp_path / "buffer").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        open_buffer(tmp_path / "file")
