"""Who may import whom, and how large things may grow: the architecture as two tables."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "engine", "kernels", "training", "loadtest")

# Rooms, or modules of rooms, that a room may import besides itself.
MAY_IMPORT = {
    "server": {
        "adaflash.engine.catalog",
        "adaflash.engine.config",
        "adaflash.engine.errors",
        "adaflash.engine.messages",
        "adaflash.engine.types",
    },
    "engine": {"adaflash.kernels"},
    "kernels": set[str](),
    # Training reads prompts as the server does: the tokenizer and its template, nothing of HTTP.
    "training": {"adaflash.engine", "adaflash.kernels", "adaflash.server.tokenizer"},
    "loadtest": set[str](),
}
# Libraries that a room, or one file of it, must do without.
MUST_NOT_IMPORT = {
    "server": {"torch", "transformers", "triton"},
    "engine": {"fastapi", "pydantic", "starlette", "transformers", "uvicorn"},
    "kernels": {"fastapi", "pydantic", "starlette", "transformers", "uvicorn"},
    "training": {"fastapi", "starlette", "uvicorn"},
    "loadtest": {"fastapi", "torch", "transformers"},
} | {
    f"engine/{name}.py": {"torch"}
    for name in (
        *("catalog", "config", "errors", "messages", "pages", "scheduler", "stopping", "types"),
        *("speculation/accept", "speculation/budget", "speculation/calibration"),
        *("speculation/costs", "speculation/cost_file", "speculation/goodput"),
        *("speculation/lookup", "speculation/policies", "speculation/suffixes"),
    )
}
# The catalog hands its environment on to pip; settings come from one place only.
READS_ENVIRONMENT = {"server/settings.py", "engine/catalog.py"}

MAX_FILE_LINES = 400  # of code: no blanks, comments, docstrings
MAX_FUNCTION_LINES = 60
TOO_LONG_ON_PURPOSE: set[str] = set()


def source_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, inside functions too; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def is_inside(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def breaches(relative: str, tree: ast.AST) -> list[str]:
    """What the file at `relative` imports and must not."""
    room = relative.split("/")[0]
    ours = MAY_IMPORT[room] | {f"adaflash.{room}", "adaflash.__version__"}
    banned = MUST_NOT_IMPORT[room] | MUST_NOT_IMPORT.get(relative, set())
    bare_or_relative = set(ROOMS)
    return [
        f"{relative} imports {name}"
        for name in imports(tree)
        if name.startswith(".")
        or is_inside(name, bare_or_relative | banned)
        or (is_inside(name, {"adaflash"}) and not is_inside(name, ours))
    ]


def code_lines(tree: ast.AST, source: str) -> int:
    """Lines of the tree that hold code: not blank, comment or docstring."""
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    first, last = getattr(tree, "lineno", 1), getattr(tree, "end_lineno", None)
    lines = source.splitlines()[first - 1 : last]
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(lines, start=first)
    )


def test_rooms_import_only_what_they_may() -> None:
    found = [
        breach
        for path in source_files()
        for breach in breaches(path.relative_to(ROOT).as_posix(), parse(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("relative", "line"),
    [
        ("server/routes/chat.py", "from adaflash.engine.scheduler import Scheduler"),
        ("server/routes/chat.py", "from adaflash.engine import scheduler"),
        ("server/app.py", "def f():\n    import torch"),
        ("engine/engine.py", "from adaflash.server.app import create_app"),
        ("engine/engine.py", "import kernels.attention"),
        ("engine/pages.py", "import torch.nn"),
        ("kernels/attention.py", "from adaflash.engine.types import Row"),
        ("training/loop.py", "from adaflash.server import settings"),
        ("loadtest/client.py", "from adaflash.engine.types import Request"),
        ("engine/engine.py", "from .types import Row"),
    ],
)
def test_a_breach_is_seen(relative: str, line: str) -> None:
    assert breaches(relative, ast.parse(line))


@pytest.mark.parametrize(
    ("relative", "line"),
    [
        ("server/app.py", "from adaflash.engine.types import Request"),
        ("server/app.py", "from adaflash import __version__"),
        ("engine/target.py", "import torch\nfrom adaflash.kernels.attention import Attention"),
        ("training/loop.py", "from adaflash.engine.models.decoder import Decoder"),
    ],
)
def test_what_is_allowed_is_no_breach(relative: str, line: str) -> None:
    assert breaches(relative, ast.parse(line)) == []


def test_packages_are_only_a_docstring() -> None:
    """So that importing a torch-free module of a room never runs another module of it."""
    for path in source_files():
        if path.name == "__init__.py":
            tree = parse(path)
            assert len(tree.body) == 1, path
            assert ast.get_docstring(tree), path


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in source_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
    }
    assert readers <= READS_ENVIRONMENT


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for path in source_files():
        name, source, tree = path.relative_to(ROOT).as_posix(), path.read_text("utf-8"), parse(path)
        if code_lines(tree, source) > MAX_FILE_LINES:
            too_long.append(name)
        too_long += [
            f"{name}:{node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and code_lines(node, source) > MAX_FUNCTION_LINES
        ]
    assert set(too_long) == TOO_LONG_ON_PURPOSE


def test_the_http_process_never_loads_torch() -> None:
    """By what is loaded in the end, whichever library would bring it in."""
    modules = [
        "adaflash." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in sorted((ROOT / "server").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    program = (
        f"import sys, {', '.join(['adaflash.cli', *modules])}\nsys.exit('torch' in sys.modules)"
    )
    outcome = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr or "torch was loaded"
