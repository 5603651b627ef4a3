"""A built wheel holds exactly what the editable install sees, and its command line works."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from adaflash import __version__

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "engine", "kernels", "training", "loadtest")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a left-over build folder would put deleted files into it."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", *ROOMS):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    return target


def pip(*argv: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *argv]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def adaflash(installed: Path, *argv: str) -> str:
    """Output of the wheel's own console script, with the checkout out of the way."""
    outcome = subprocess.run(
        [sys.executable, "-P", installed / "bin" / "adaflash", *argv],
        env={"PATH": os.defpath, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_the_wheel_holds_the_rooms(wheel: Path) -> None:
    expected = {
        f"adaflash/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    } | {f"adaflash/{path.name}" for path in (ROOT / "src/adaflash").glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected | {"adaflash/py.typed"}


def test_the_wheel_s_command_line_works(installed: Path) -> None:
    assert adaflash(installed, "--version") == f"adaflash {__version__}\n"
    assert "--max-num-seqs" in adaflash(installed, "serve", "--help")


def test_the_wheel_is_what_runs(installed: Path) -> None:
    """Or the two tests above would be about the checkout."""
    program = "import adaflash.server.settings as module; print(module.__file__)"
    outcome = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(outcome.stdout.strip()).is_relative_to(installed)


def test_every_dependency_is_pinned() -> None:
    """And installed in the version that is pinned, so that the tests speak for it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for name in closure(Requirement("adaflash[dev]")):
        version = importlib.metadata.version(name).split("+")[0]  # "+cpu" says how it was built
        assert pinned.get(name) == version, name


def closure(root: Requirement) -> set[NormalizedName]:
    """Everything that installing `root` brings in, without `root`.

    What torch brings in is left out: its builds for other accelerators have their own.
    """
    seen: set[str] = set()
    found: set[NormalizedName] = set()
    to_visit = [root]
    while to_visit:
        parent = to_visit.pop()
        for child in map(Requirement, importlib.metadata.requires(parent.name) or []):
            if applies(child, parent.extras) and str(child) not in seen:
                seen.add(str(child))
                found.add(canonicalize_name(child.name))
                to_visit += [child] if child.name != "torch" else []
    return found


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
