"""The acceptance curve of a server that learns from a workload it was not trained for.

    python bench/live_learning.py PROMPTS.jsonl --drafter DIR --out DIR [--minutes 30]

Starts `adaflash serve --learn` and `adaflash train follow` beside it, asks every prompt once, in a
fixed random order, and samples /metrics. Writes samples.csv and curve.svg. Drafted lengths are
fixed and nothing is looked up, so that the curve shows the drafter alone.
"""

import argparse
import asyncio
import contextlib
import csv
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from adaflash.training.prompts import Prompt, read_prompts

URL = "http://127.0.0.1:8918"
ADAFLASH = str(Path(sys.executable).with_name("adaflash"))
SERVE = ("--port", URL.rsplit(":", 1)[1], "--no-access-log", "--lookup-drafts", "0")
WIDTH, HEIGHT, MARGIN = 800, 400, 60  # of the plot, in pixels


@dataclass(frozen=True)
class Sample:
    """What happened since the sample before."""

    seconds: float  # since the start
    version: int  # of the drafter, 0 the first
    verifications: int
    accepted: int
    accepted_length: float  # tokens per verification, the target's own among them
    kept_texts: int  # since the start


@dataclass
class Counters:
    """Of /metrics, at one time."""

    version: float
    drafts: float
    accepted: float
    kept: float

    @classmethod
    def read(cls) -> "Counters":
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(URL + "/metrics", timeout=30).text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return cls(
            values["adaflash_drafter_version"],
            values["adaflash_spec_decode_num_drafts_total"],
            values["adaflash_spec_decode_num_accepted_tokens_total"],
            values["adaflash_learn_kept_texts_total"],
        )


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([ADAFLASH, *command])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(URL + "/ready").status_code == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not start")


class Workload:
    """Clients that ask one prompt after the other until none is left or they are stopped."""

    def __init__(self, prompts: Sequence[Prompt], max_tokens: int, concurrency: int) -> None:
        self._prompts = iter(prompts)
        self._max_tokens = max_tokens
        self._concurrency = concurrency
        self.stopping = False
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=600) as client:
            await asyncio.gather(*(self._ask(client) for _ in range(self._concurrency)))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        for prompt in self._prompts:
            if self.stopping:
                return
            body = {
                "messages": prompt.messages,
                "max_tokens": self._max_tokens,
                "temperature": 0,
            }
            response = await client.post("/v1/chat/completions", json=body)
            response.raise_for_status()


def sample_while(workload: Workload, minutes: float, every_s: float) -> Iterator[Sample]:
    started_s, before = time.monotonic(), Counters.read()
    while workload.thread.is_alive() and time.monotonic() - started_s < minutes * 60:
        workload.thread.join(every_s)
        now = Counters.read()
        drafts, accepted = now.drafts - before.drafts, now.accepted - before.accepted
        if drafts:
            yield Sample(
                round(time.monotonic() - started_s, 1),
                int(now.version),
                int(drafts),
                int(accepted),
                round(1 + accepted / drafts, 4),
                int(now.kept),
            )
        before = now
    workload.stopping = True


def plot(samples: Sequence[Sample]) -> str:
    """An SVG: accepted length over time, with a line where a version came in."""
    last_s = max(sample.seconds for sample in samples)
    lengths = [sample.accepted_length for sample in samples]
    low, high = min(lengths), max(max(lengths), min(lengths) + 0.1)

    def x(seconds: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * seconds / last_s

    def y(length: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (length - low) / (high - low)

    points = " ".join(f"{x(s.seconds):.1f},{y(s.accepted_length):.1f}" for s in samples)
    parts = [f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>']
    for before, sample in itertools.pairwise(samples):
        if sample.version != before.version:
            at = f"{x(sample.seconds):.1f}"
            parts.append(f'<path d="M{at} {MARGIN}V{HEIGHT - MARGIN}" stroke="#bbb"/>')
            parts.append(f'<text x="{at}" y="{MARGIN - 6}">{sample.version}</text>')
    for value in (low, high):
        parts.append(f'<text x="8" y="{y(value):.1f}">{value:.2f}</text>')
    parts.append(f'<text x="{WIDTH - 2 * MARGIN}" y="{HEIGHT - 20}">{last_s:.0f} s</text>')
    parts.append('<text x="8" y="20">accepted length; versions of the drafter above</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def mean_length(samples: Sequence[Sample]) -> float:
    return 1 + sum(s.accepted for s in samples) / sum(s.verifications for s in samples)


def report(samples: Sequence[Sample], out: Path) -> None:
    with (out / "samples.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(samples[0])))
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples)
    (out / "curve.svg").write_text(plot(samples))
    fifth = max(1, len(samples) // 5)
    print(
        f"accepted length {mean_length(samples[:fifth]):.3f} in the first fifth, "
        f"{mean_length(samples[-fifth:]):.3f} in the last; "
        f"{samples[-1].version} versions, {samples[-1].kept_texts} texts kept; see {out}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("prompts", nargs="+", type=Path, help="JSONL, as for adaflash train generate")
    add("--drafter", required=True)
    add("--out", type=Path, required=True, help="for the curve, and the learning folder")
    add("--model", help="left out: the default")
    add("--speculation", default="fixed:7")
    add("--minutes", type=float, default=30.0)
    add("--every-s", type=float, default=15.0)
    add("--concurrency", type=int, default=8)
    add("--max-tokens", type=int, default=256)
    add("--threads", type=int, default=1, help="of the trainer, and of the engine")
    add("--follow-config", type=Path)
    add("--data", action="append", default=[], help="older texts for the trainer; repeat")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.prompts)
    random.Random(0).shuffle(prompts)
    learn, threads = str(options.out / "learn"), str(options.threads)
    model = [options.model] if options.model else []
    serve = ["serve", *model, *SERVE, "--learn", learn, "--num-threads", threads]
    serve += ["--drafter", options.drafter, "--speculation", options.speculation]
    follow = ["train", "follow", learn, "--threads", threads, "--drafter", options.drafter]
    follow += ["--target", options.model] if options.model else []
    follow += ["--config", str(options.follow_config)] if options.follow_config else []
    follow += [part for folder in options.data for part in ("--data", folder)]
    with running(*serve) as server:
        wait_until_ready(server)
        with running(*follow):
            workload = Workload(prompts, options.max_tokens, options.concurrency)
            samples = []
            for sample in sample_while(workload, options.minutes, options.every_s):
                print(sample, flush=True)
                samples.append(sample)
    if not samples:
        sys.exit("nothing was drafted")
    report(samples, options.out)


if __name__ == "__main__":
    main()
