"""The command line as a person meets it: exit codes, one-line errors, help."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from adaflash import __version__
from adaflash.server.settings import ServerSettings


def adaflash(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script with no settings but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ADAFLASH_")}
    return subprocess.run(
        [Path(sys.executable).with_name("adaflash"), *argv],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_version() -> None:
    outcome = adaflash("--version")
    assert (outcome.returncode, outcome.stdout) == (0, f"adaflash {__version__}\n")


def test_help_names_the_commands() -> None:
    outcome = adaflash("--help")
    assert outcome.returncode == 0
    assert "serve" in outcome.stdout
    assert "pull" in outcome.stdout


def test_serve_help_explains_every_setting() -> None:
    outcome = adaflash("serve", "--help")
    assert outcome.returncode == 0
    words = " ".join(outcome.stdout.split())
    for name, field in ServerSettings.model_fields.items():
        assert field.description
        assert field.description in words, name
    assert "(default: 8000)" in words
    assert "--prefix-cache, --no-prefix-cache" in words
    assert max(map(len, outcome.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["srve"], "invalid choice: 'srve' (choose from 'serve', 'pull', 'train', 'evaluate')"),
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["serve", "--prot=1"], "unknown argument --prot; did you mean --port?"),
        (["serve", "--no-prefix-cach"], "--no-prefix-cach; did you mean --no-prefix-cache?"),
        (["serve", "--max-num", "1"], "unknown argument --max-num"),
        (["serve", "a-model", "another"], "unknown argument another"),
        (["serve", "--port", "x"], "--port: input should be a valid integer"),
        (["serve", "--speculation", "fast"], "error: --speculation: speculation must be off, "),
        (["serve", "--threshold-ema", "2"], "--threshold-ema: input should be less than or equal"),
        (["serve", "--api-key"], "argument --api-key: expected one argument"),
        (["serve", "--config", "absent.yaml"], "cannot read the settings in absent.yaml"),
        (["pull", "--port", "1"], "unknown argument --port"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(argv: list[str], message: str) -> None:
    outcome = adaflash(*argv)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_unknown_environment_is_refused() -> None:
    outcome = adaflash("pull", ADAFLASH_MODLE="m")
    assert outcome.returncode == 2
    assert "ADAFLASH_MODLE; did you mean ADAFLASH_MODEL?" in outcome.stderr


def test_pull_prints_the_path_alone(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    outcome = adaflash("pull", str(model))
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, f"{model}\n", "")


def test_pull_prints_the_drafter_s_folder_second(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    outcome = adaflash("pull", str(tmp_path / "model.gguf"), "--drafter", str(drafter))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout == f"{tmp_path / 'model.gguf'}\n{drafter}\n"


@pytest.mark.parametrize("command", ["pull", "serve"])
def test_an_unknown_drafter_is_one_line_and_code_1(command: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    argv = (command, str(model), "--drafter", "no-such-drafter")
    outcome = adaflash(*argv, *(["--port", "0"] if command == "serve" else []))
    assert outcome.returncode == 1
    assert outcome.stderr == (
        "adaflash: error: the drafter 'no-such-drafter' was not found: give the folder of a "
        "drafter's checkpoint, a hub id (org/name), or none\n"
    )


@pytest.mark.parametrize("command", ["pull", "serve"])
def test_an_unknown_model_is_one_line_and_code_1(command: str, tmp_path: Path) -> None:
    argv = (command, "no-such-model", "--model-cache-dir", str(tmp_path))
    outcome = adaflash(*argv, *(["--port", "0"] if command == "serve" else []))
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("adaflash: error: ")
    assert "no-such-model" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_taken_port_is_one_line_and_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = adaflash("serve", str(tmp_path), "--port", str(port))
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr == f"adaflash: error: 127.0.0.1:{port} is already in use\n"
