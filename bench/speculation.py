"""Speculation against plain decoding: the engine in this process, policies alternating, in rounds.

    python bench/speculation.py [--policies goodput,fixed:3] [--concurrency 1,8,32]
    python bench/speculation.py --drafter FOLDER --policies goodput,goodput@0 ...
    python bench/speculation.py --replay 0.7 ...

All policies get the same prompts in the same round, one after the other, so that their ratios to
`off` are paired. POLICY@N looks up N drafts at most, 0: none. With --replay the drafts are the text
that `off` wrote, each right with this chance: what the budget and the verification do with a
drafter of that quality, whose own pass costs nothing. Prints tokens per second, the ratio to `off`,
tokens per verification, the drafts of each source in it (accepted/verified), and how many texts are
those of `off`: all of them in float32; in bfloat16 a batch of another shape can round a near-tie
the other way, which `reversed` shows: plain decoding too, of the same requests in the opposite
order.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from concurrency import prompt

from adaflash.engine.build import Drafting, Models, assemble, size_cache
from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.config import EngineConfig, Policy, SpeculationConfig, parse_policy
from adaflash.engine.devices import choose_device
from adaflash.engine.engine import Engine
from adaflash.engine.messages import DraftedBy
from adaflash.engine.models.weights import load_decoder, load_drafter
from adaflash.engine.speculation.budget import Estimate
from adaflash.engine.speculation.step import Block
from adaflash.engine.target import Verified
from adaflash.engine.types import Request, Row, SamplingParams
from adaflash.kernels.reference_attention import ReferenceAttention
from adaflash.server.settings import default_cache_dir
from adaflash.server.tokenizer import Tokenizer, load_tokenizer

CONTROL = "reversed"


@dataclass
class Run:
    """What a policy did in one round at one concurrency."""

    seconds: float
    texts: dict[str, list[int]]
    num_verifications: int
    num_accepted: Counter[DraftedBy]
    num_drafts: Counter[DraftedBy]

    @property
    def rate(self) -> float:
        return sum(map(len, self.texts.values())) / self.seconds


def serve(engine: Engine, requests: list[Request]) -> Run:
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    verifications, accepted, drafts = 0, Counter[DraftedBy](), Counter[DraftedBy]()
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            texts[delta.request_id] += delta.token_ids
            if delta.num_drafts is not None:
                verifications += 1
            if delta.num_drafts and delta.drafted_by is not None:
                drafts[delta.drafted_by] += delta.num_drafts
                accepted[delta.drafted_by] += delta.num_accepted
    return Run(time.perf_counter() - started, texts, verifications, accepted, drafts)


def requests_of(
    tokenizer: Tokenizer, options: argparse.Namespace, first: int, count: int
) -> list[Request]:
    assert tokenizer.chat_template is not None
    prompts = read_prompts(options.prompts) if options.prompts else []
    requests = []
    for number in range(first, first + count):
        content = prompts[number % len(prompts)] if prompts else prompt(number)
        messages = [{"role": "user", "content": content}]
        text = tokenizer.chat_template.render(messages)
        sampling = SamplingParams(
            seed=number,
            max_tokens=options.tokens,
            temperature=options.temperature,
            ignore_eos=not options.prompts,
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        requests.append(Request(request_id=f"{number}", prompt_ids=ids, sampling=sampling))
    return requests


def read_prompts(path: Path) -> list[str]:
    """Of a file with a JSON object a line, in an order that mixes it."""
    lines = path.read_text(encoding="utf-8").split("\n")  # a prompt may hold other line ends
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    random.Random(0).shuffle(prompts)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--drafter", type=Path)
    source.add_argument("--replay", type=float, metavar="CHANCE")
    parser.add_argument("--policies", default="goodput,fixed:3")
    parser.add_argument("--prompts", type=Path, help="JSON lines; requests then end where they do")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    path = locate(options.model, cache_dir=default_cache_dir(), on_progress=lambda *_: None)
    tokenizer = load_tokenizer(path)
    policies = ["off", CONTROL, *options.policies.split(",")]
    engines, known = build(options, path, policies)
    levels = [int(level) for level in options.concurrency.split(",")]
    runs: dict[tuple[int, str], list[Run]] = {}
    for round_number in range(-1, options.rounds):  # the first to warm up
        for level in levels if round_number >= 0 else levels[-1:]:
            first = 1000 * (round_number + 2) + 10 * level
            asked = requests_of(tokenizer, options, first, level)
            for policy in policies:
                run = serve(engines[policy], asked[::-1] if policy == CONTROL else asked)
                if policy == "off":
                    known.update(
                        {r.request_id: r.prompt_ids + run.texts[r.request_id] for r in asked}
                    )
                if round_number >= 0:
                    runs.setdefault((level, policy), []).append(run)
    report(runs)


def build(
    options: argparse.Namespace, path: Path, policies: list[str]
) -> tuple[dict[str, Engine], dict[str, list[int]]]:
    """An engine per policy around the same weights; and where texts to replay are put."""
    known: dict[str, list[int]] = {}
    base = EngineConfig(
        model_path=str(path), dtype=options.dtype, num_threads=options.threads, kv_cache_gib=0.6
    )
    device = choose_device(base)
    torch.set_num_threads(device.num_threads)
    print(f"{path.name}, {device.dtype_name}, {device.num_threads} threads")
    decoder = load_decoder(path, device.dtype, device.device)
    engines = {}
    with tempfile.TemporaryDirectory() as costs:
        for policy in policies:
            config = msgspec.structs.replace(base, speculation=config_of(policy), cost_dir=costs)
            kind = config.speculation.policy
            drafter, drafting = None, None
            if kind is not Policy.OFF and options.drafter is not None:
                drafter = load_drafter(options.drafter, decoder.config, device.dtype, device.device)
            elif kind is not Policy.OFF and options.replay is not None:
                drafting = Drafting(Replay(known, options.replay), widths=(2, 4, 8))
            models = Models(decoder, drafter, device, ReferenceAttention())
            engines[policy] = assemble(config, models, size_cache(config, models), drafting)
    return engines, known


def config_of(policy: str) -> SpeculationConfig:
    """policy: `fixed:3`, or `fixed:3@0` with no drafts looked up."""
    name, _, looked_up = policy.partition("@")
    kind, length = parse_policy("off" if name == CONTROL else name)
    found = SpeculationConfig(policy=kind, fixed_length=length)
    return msgspec.structs.replace(found, lookup_drafts=int(looked_up)) if looked_up else found


@dataclass
class Replay:
    """See DraftSource."""

    texts: Mapping[str, list[int]]
    chance: float
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def denoise(self, rows: Many[Row], width: int) -> Block:
        return Block(tuple(rows), torch.zeros(len(rows), width, 1))

    def estimate(self, block: Block) -> Estimate:
        num_rows, width, _ = block.hidden.shape
        return Estimate(np.full((num_rows, width - 1), self.chance), np.full(num_rows, self.chance))

    def propose(self, block: Block, lengths: Many[int]) -> list[tuple[int, ...]]:
        return [self._drafts(row, n) for row, n in zip(block.rows, lengths, strict=True)]

    def observe(self, verified: Verified) -> None:
        pass

    def _drafts(self, row: Row, length: int) -> tuple[int, ...]:
        text = self.texts.get(row.sequence.request.request_id, [])
        places = range(row.start + 1, row.start + 1 + length)
        return tuple(
            text[p] if p < len(text) and self._draw.random() < self.chance else 0 for p in places
        )


def report(runs: dict[tuple[int, str], list[Run]]) -> None:
    print("concurrency  policy      tokens/s (min .. max)      ratio to off      "
          "tokens/verification  drafter  lookup  same texts")  # fmt: skip
    for (level, policy), own in runs.items():
        plain = runs[level, "off"]
        rates = [run.rate for run in own]
        ratios = [run.rate / base.rate for run, base in zip(own, plain, strict=True)]
        same = sum(
            run.texts[name] == text
            for run, base in zip(own, plain, strict=True)
            for name, text in base.texts.items()
        )
        verifications = sum(run.num_verifications for run in own)
        tokens = 1 + sum(run.num_accepted.total() for run in own) / verifications
        drafter, lookup = (share_of(own, source) for source in DraftedBy)
        print(
            f"{level:>11}  {policy:<10}  {statistics.median(rates):7.1f} "
            f"({min(rates):.1f} .. {max(rates):.1f})  {statistics.median(ratios):6.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f})  {tokens:12.2f}  {drafter}  {lookup}  "
            f"{same} of {level * len(own)}"
        )


def share_of(runs: list[Run], source: DraftedBy) -> str:
    """Drafts of one source in a verification: accepted / verified."""
    verifications = sum(run.num_verifications for run in runs)
    accepted = sum(run.num_accepted[source] for run in runs) / verifications
    drafts = sum(run.num_drafts[source] for run in runs) / verifications
    return f"{accepted:.2f}/{drafts:.2f}"


if __name__ == "__main__":
    main()
