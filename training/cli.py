"""`adaflash train …`: make drafters."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaflash.training.follow_cli import add_follow
from adaflash.training.options import add_target, load_target, target_path


def train(argv: Sequence[str]) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="adaflash train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_fit(commands)
    add_follow(commands)
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], None] = options.run
    run(options)


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="let the target answer prompts",
        description="Let the target answer prompts. Goes on where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("prompts", nargs="+", type=Path, help="JSONL files with `prompt` or `messages`")
    add("--out", type=Path, required=True, help="folder for the shards")
    add("--max-tokens", type=int, default=256, help="tokens of an answer")
    add("--max-prompt-tokens", type=int, default=512, help="leave longer prompts out")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--samples", type=int, default=1, help="answers per prompt")
    add("--in-flight", type=int, default=64, help="requests at once")
    add("--shard-size", type=int, default=256, help="answers per file")
    add("--seed", type=int, default=0, help="of the order of prompts")
    add("--limit", type=int, help="take only so many prompts")
    add_target(parser)
    parser.set_defaults(run=_generate)


def _add_fit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "fit",
        help="train a drafter on the target's answers",
        description="Train a drafter on what `generate` wrote. Goes on where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("config", type=Path, help="YAML file; see docs/training.md")
    add("--out", type=Path, required=True, help="folder for the run")
    add("--until", type=int, help="stop after this step of the schedule")
    add_target(parser)
    parser.set_defaults(run=_fit)


def _fit(options: argparse.Namespace) -> None:
    from adaflash.training.config import read_fit_config
    from adaflash.training.data import open_data
    from adaflash.training.fit import Trainer

    config = read_fit_config(options.config)
    decoder = load_target(options)
    data = open_data(config, decoder, print)
    trainer = Trainer(config, decoder, data, options.out)
    print(f"{len(data.train)} texts; the draft vocabulary covers {trainer.coverage:.2%} of them")
    trainer.run(lambda line: print(line, flush=True), options.until)


def _generate(options: argparse.Namespace) -> None:
    from adaflash.engine.build import build_engine
    from adaflash.engine.config import EngineConfig
    from adaflash.server.tokenizer import load_tokenizer
    from adaflash.training.generate import GenerateOptions, generate
    from adaflash.training.prompts import interleave, read_prompts

    path = target_path(options)
    prompts = interleave(read_prompts(options.prompts), options.seed)[: options.limit]
    config = EngineConfig(
        model_path=str(path),
        num_threads=options.threads,
        max_num_seqs=options.in_flight,
        max_batched_tokens=max(256, 2 * options.in_flight),
        max_model_len=options.max_prompt_tokens + options.max_tokens,
    )
    engine, _ = build_engine(config)
    how = GenerateOptions(
        out=options.out,
        max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        temperature=options.temperature,
        num_samples=options.samples,
        in_flight=options.in_flight,
        shard_size=options.shard_size,
    )
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[tokens]} tokens")) as bar:
        task = bar.add_task("answers", total=None, tokens=0)
        for at in generate(engine, load_tokenizer(path), prompts, how):
            bar.update(task, completed=at.num_done, total=at.num_total, tokens=at.num_tokens)


def evaluate(argv: Sequence[str]) -> None:
    """`adaflash evaluate`: how good a drafter is on texts of the target."""
    parser = argparse.ArgumentParser(
        prog="adaflash evaluate",
        description="Accepted length and calibration of a drafter, by domain, on texts of the "
        "target that it was not trained on (`adaflash train generate`, greedy or sampled).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("drafter", type=Path, help="folder of the drafter")
    add("data", nargs="+", type=Path, help="folders of texts")
    add("--texts", type=int, default=400, help="take at most so many, evenly from all")
    add("--json", type=Path, help="file for the figures")
    add("--plot", type=Path, help="SVG file for the survival curves")
    add_target(parser)
    _evaluate(parser.parse_args(argv))


def _evaluate(options: argparse.Namespace) -> None:
    import torch
    from rich.console import Console

    from adaflash.engine.models.weights import load_drafter
    from adaflash.training.data import open_texts, some_texts
    from adaflash.training.evaluate import evaluate_by_temperature
    from adaflash.training.objective import TargetEnds
    from adaflash.training.report import print_table, write_json, write_plot

    decoder = load_target(options)
    weight = decoder.head_weight
    drafter = load_drafter(options.drafter, decoder.config, weight.dtype, weight.device)
    store = open_texts(options.data, decoder, drafter.config.tap_layers, print)
    everything = torch.arange(decoder.config.vocab_size)
    token_ids = everything if drafter.token_ids is None else drafter.token_ids
    ends = TargetEnds.of(decoder, token_ids)
    found = evaluate_by_temperature(drafter, ends, some_texts(store, options.texts))
    print_table(found, Console(width=110))  # also where there is no terminal
    if options.json:
        write_json(found, options.json)
    if options.plot:
        write_plot(found, options.plot)
