"""`adaflash train follow`: learn from what a running server writes down."""

import argparse
from pathlib import Path

from adaflash.training.options import add_target, load_target


def add_follow(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "follow",
        help="train on what a server with --learn writes, and publish better drafters",
        description="Train on the texts that `adaflash serve --learn DIR` keeps, and publish "
        "drafters that do no worse on texts held out; the server takes them up. Goes on where it "
        "stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="the server's learning folder")
    add("--drafter", type=Path, help="folder of the drafter to start from, if DIR has none yet")
    add("--data", action="append", type=Path, help="folder of older texts to mix in; repeat")
    add("--config", type=Path, help="YAML file of settings; see training/follow_config.py")
    add("--once", action="store_true", help="end when nothing more is to be learnt")
    add("--poll-s", type=float, default=5.0, help="seconds between two looks for new texts")
    add_target(parser)
    parser.set_defaults(run=_follow)


def _follow(options: argparse.Namespace) -> None:
    import msgspec

    from adaflash.training.follow import Follower
    from adaflash.training.follow_config import read_follow_config

    config = read_follow_config(options.config)
    if options.data:
        config = msgspec.structs.replace(config, data=[str(folder) for folder in options.data])
    follower = Follower(
        options.folder,
        load_target(options),
        config,
        drafter=options.drafter,
        say=lambda line: print(line, flush=True),
    )
    follower.run(poll_s=options.poll_s, once=options.once)
