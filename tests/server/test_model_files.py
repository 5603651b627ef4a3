"""Where the drafter's files come from."""

from pathlib import Path

import pytest

from adaflash.engine.catalog import OnProgress
from adaflash.engine.errors import CheckpointError
from adaflash.server.model_files import find_drafter
from adaflash.server.settings import ServerSettings


def find(drafter: str, cache: Path, speculation: str = "goodput") -> Path | None:
    settings = ServerSettings(drafter=drafter, speculation=speculation, model_cache_dir=cache)
    return find_drafter(settings)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "drafter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("org/drafter", tmp_path) == tmp_path / "org" / "drafter"  # not the hub's


def test_there_is_none_unless_one_is_asked_for_and_used(tmp_path: Path) -> None:
    assert find("none", tmp_path) is None
    assert find(str(tmp_path), tmp_path, speculation="off") is None
    assert find("no-such-drafter", tmp_path, speculation="off") is None


def test_a_hub_id_is_fetched_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def locate(name: str, *, cache_dir: Path, on_progress: OnProgress) -> Path:
        on_progress(1 << 20, 2 << 20)
        return cache_dir / name

    monkeypatch.setattr("adaflash.server.model_files.locate", locate)
    assert find("org/drafter-0.6B", tmp_path) == tmp_path / "org" / "drafter-0.6B"
    assert capsys.readouterr().err == "fetching org/drafter-0.6B: 1 of 2 MiB\n"


@pytest.mark.parametrize(
    "drafter",
    ["none/", "./drafter", "/no/such/drafter", "smollm2-135m-instruct", "a/b/c", "org/name:x.gguf"],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(drafter: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was not found: give the folder .*, or none$"):
        find(drafter, tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drafter.gguf").touch()
    with pytest.raises(CheckpointError, match="is not a folder: give the folder"):
        find(str(tmp_path / "drafter.gguf"), tmp_path)
