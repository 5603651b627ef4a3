"""The commands `serve` and `pull`, with flags made from the settings."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from adaflash.engine.errors import ConfigError
from adaflash.server.model_files import find_drafter, find_model
from adaflash.server.settings import Flag, ServerSettings, load_settings, nearest

SERVE_NOTES = """\
Every flag can also be set in the environment (ADAFLASH_MAX_NUM_SEQS=32) or in a YAML file
(max_num_seqs: 32). Flags win over the environment, and the environment over the file.

examples:
  adaflash serve
  adaflash serve ./Qwen3-0.6B --port 9000 --max-num-seqs 128
  adaflash serve HuggingFaceTB/SmolLM2-360M-Instruct --config server.yaml
"""
PULL_NOTES = """\
example:
  adaflash pull HuggingFaceTB/SmolLM2-360M-Instruct
"""


def serve(argv: Sequence[str]) -> None:
    """`adaflash serve`: run the server until a signal ends it."""
    parser = SettingsParser(
        prog="adaflash serve",
        description="Serve a model with the OpenAI HTTP API.",
        epilog=SERVE_NOTES,
    )
    parser.add_settings(ServerSettings.model_fields)
    settings = parser.settings(argv)
    # Late, so that `--help` and refused flags need not wait for the whole server to import.
    from adaflash.server.serve import run_server

    run_server(settings)


def pull(argv: Sequence[str]) -> None:
    """`adaflash pull`: fetch a model, and a drafter if one is given; print where they are."""
    parser = SettingsParser(
        prog="adaflash pull",
        description="Fetch a model into the local cache, unless it is there, and print its path; "
        "with a drafter, do the same for it, on a second line.",
        epilog=PULL_NOTES,
    )
    parser.add_settings(("model", "drafter", "model_cache_dir", "config"))
    settings = parser.settings(argv)
    print(find_model(settings), flush=True)
    drafter = find_drafter(settings)
    if drafter is not None:
        print(drafter)


class SettingsParser(argparse.ArgumentParser):
    """Flags for fields of ServerSettings. argparse finds the words, the settings judge values."""

    def __init__(self, *, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [MODEL] [flags]",
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,  # what is not given is not in the namespace
        )
        self._groups: dict[str, argparse._ArgumentGroup] = {}

    def add_settings(self, names: Iterable[str]) -> None:
        for name in names:
            field = ServerSettings.model_fields[name]
            flag = next(item for item in field.metadata if isinstance(item, Flag))
            if flag.group not in self._groups:
                self._groups[flag.group] = self.add_argument_group(flag.group)
            _add_flag(self._groups[flag.group], name, field, flag)

    def settings(self, argv: Sequence[str]) -> ServerSettings:
        """The settings of this command line. Exits with code 2 and one line if they are wrong."""
        flags, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].split("=")[0]
            self.error(f"unknown argument {name}{nearest(name, self._option_string_actions)}")
        try:
            return load_settings(vars(flags))
        except ConfigError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo, flag: Flag) -> None:
    option = "--" + name.replace("_", "-")
    text = f"{field.description}{_default(field)}".replace("%", "%%")
    if name == "model":
        group.add_argument(name, metavar=flag.metavar, nargs="?", help=text)
    elif field.annotation is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = flag.metavar or "|".join(_choices(field))
        action = "append" if get_origin(field.annotation) is tuple else "store"
        group.add_argument(option, action=action, metavar=metavar, help=text)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    assert get_origin(field.annotation) is Literal, "only choices go without a metavar"
    return get_args(field.annotation)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return ""
    shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    return f" (default: {shown})"
