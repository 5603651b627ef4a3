"""Names and words others rely on: the package, its console script, its modules' first lines."""

import ast
import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import adaflash
from adaflash.cli import COMMANDS

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for room in ("server", "engine", "kernels", "training", "loadtest")
    for path in (ROOT / room).rglob("*.py")
)


def test_the_version_is_the_distribution_s() -> None:
    assert adaflash.__version__ == importlib.metadata.version("adaflash")
    assert re.fullmatch(r"\d+\.\d+\.\d+", adaflash.__version__)


def test_the_package_offers_its_version_and_nothing_else() -> None:
    """Everything else is imported from the module that defines it."""
    tree = ast.parse((ROOT / "src/adaflash/__init__.py").read_text())
    assigned = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    assert (assigned, len(tree.body)) == (["__version__"], 2)


def test_the_console_script_is_there() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="adaflash")
    assert script.value == "adaflash.cli:main"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_function(name: str) -> None:
    command = COMMANDS[name]
    assert callable(getattr(importlib.import_module(command.module), command.function))


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert silent == []


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs/structure.md").read_text()
    sections = re.split(r"^\*\*([a-z/]+)/\*\*", text, flags=re.MULTILINE)[1:]
    named = {
        f"{folder}/{name}"
        for folder, section in zip(sections[::2], sections[1::2], strict=True)
        for name in re.findall(r"`([a-z_/]+\.py)`", section)
    }
    modules = {path.relative_to(ROOT).as_posix() for path in FILES if path.name != "__init__.py"}
    assert named == modules | {"src/adaflash/cli.py"}
