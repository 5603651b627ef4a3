"""Killed at any moment, a writer leaves whole shards and a whole version; so readers see."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adaflash.engine.learning.buffer import Buffer
from adaflash.engine.learning.versions import current_version, version_folder
from adaflash.engine.trajectories import PATTERN, read_shard
from tests.engine.learning.killed import PART_BYTES

KILLS = 8


@contextmanager
def killed_soon(what: str, folder: Path, draw: random.Random) -> Iterator[None]:
    """Runs the block beside a writer, which is killed at its end, whatever it was doing."""
    program = Path(__file__).with_name("killed.py")
    writer = subprocess.Popen([sys.executable, str(program), what, str(folder)])
    try:
        yield
        time.sleep(draw.random() / 50)
    finally:
        writer.kill()
        writer.wait()


def whole_shards(folder: Path) -> int:
    """Reads all shards; how many texts they hold."""
    count = 0
    for path in sorted((folder / "buffer").glob(PATTERN)):
        try:
            texts = read_shard(path)
        except Exception:
            if not path.exists():  # deleted between the two looks, not torn
                continue
            raise
        assert len(texts) == 8
        for text in texts:
            number = int(text.name[1:])
            assert text.token_ids == (number,) * 500
            assert text.rejected == (number % 500,)
        count += len(texts)
    return count


def whole_version(folder: Path) -> int:
    """Reads the version in use; its number."""
    for _ in range(100):
        name = current_version(folder)
        if name is None:
            return 0
        path = version_folder(folder, name)
        try:
            parts = [(path / part).read_bytes() for part in ("a", "b", "c")]
        except FileNotFoundError:
            assert current_version(folder) != name, "the version in use is not whole"
            continue  # the writer has published three more since we looked
        assert len(set(parts)) == 1
        assert len(parts[0]) == PART_BYTES
        return int(name)
    raise AssertionError("never saw a version long enough to read it")


def test_shards_are_whole_whenever_the_writer_dies(tmp_path: Path) -> None:
    draw, seen = random.Random(0), 0
    for _ in range(KILLS):
        with killed_soon("shards", tmp_path, draw):
            deadline = time.monotonic() + 30
            before = seen
            while seen <= before and time.monotonic() < deadline:
                seen = max(seen, newest(tmp_path))
                whole_shards(tmp_path)
        whole_shards(tmp_path)
        assert seen > before
    Buffer(tmp_path / "buffer", max_bytes=300_000, max_age_s=60).close()
    assert not list((tmp_path / "buffer").glob(".shard-*")), "scratch files are cleared away"


def newest(folder: Path) -> int:
    names = sorted(path.stem for path in (folder / "buffer").glob(PATTERN))
    return int(names[-1].partition("-")[2]) if names else 0


def test_the_version_in_use_is_whole_whenever_the_publisher_dies(tmp_path: Path) -> None:
    draw, seen = random.Random(0), 0
    for _ in range(KILLS):
        with killed_soon("versions", tmp_path, draw):
            deadline = time.monotonic() + 30
            before = seen
            while seen < before + 2 and time.monotonic() < deadline:
                found = whole_version(tmp_path)
                assert found >= seen, "it went back"
                seen = found
        assert seen >= before + 2
        assert whole_version(tmp_path) >= seen
    assert len(list((tmp_path / "versions").iterdir())) <= 5


def test_a_pointer_to_nowhere_is_an_error(tmp_path: Path) -> None:
    from adaflash.engine.errors import CheckpointError

    for content in ("../../etc", "", "12", "000001/.."):
        (tmp_path / "CURRENT").write_text(content)
        with pytest.raises(CheckpointError, match="names no version"):
            current_version(tmp_path)
