"""The console script `adaflash`: hands over to the command line of the room that is asked for."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from adaflash import __version__
from adaflash.engine.errors import AdaFlashError

FAILURE = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True)
class Command:
    """A function `(argv) -> None` that is imported only when its command is run."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "serve": Command("adaflash.server.cli", "serve", "start the server"),
    "pull": Command("adaflash.server.cli", "pull", "fetch a model into the local cache"),
    "train": Command("adaflash.training.cli", "train", "make a drafter"),
    "evaluate": Command("adaflash.training.cli", "evaluate", "judge a drafter on held-out texts"),
}


def main() -> NoReturn:
    """Run the command in `sys.argv`; errors raised on purpose end in one line and exit code 1."""
    # As Ctrl-C does: what is half done is cleaned up. The server installs its own once it runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(sys.argv[1:])
    except AdaFlashError as error:
        print(f"adaflash: error: {error}", file=sys.stderr)
        sys.exit(FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def run(argv: Sequence[str]) -> None:
    """Import the command's room and call it with the rest of the arguments."""
    parser = _Parser(
        prog="adaflash",
        usage="adaflash COMMAND ...",
        description=_commands(),
        epilog="`adaflash COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"adaflash {__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", choices=tuple(COMMANDS), help=argparse.SUPPRESS
    )
    command = COMMANDS[parser.parse_args(argv[:1]).command]
    getattr(importlib.import_module(command.module), command.function)(argv[1:])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see adaflash --help\n")


def _commands() -> str:
    lines = (f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return "AdaFlash, a high-concurrency LLM inference server.\n\ncommands:\n" + "\n".join(lines)
