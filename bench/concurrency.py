"""Output tokens per second of the server at several concurrencies, alternating, in rounds.

    python bench/concurrency.py [--concurrency 1,8,32] [--rounds 3] [--flags "--num-threads 1"]

Starts `adaflash serve` with the flags, or takes a running server with --url. Streaming,
temperature 0, `ignore_eos`, prompts that share nothing; the client runs on the server's machine.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

NUM_TOKENS = 128
OWN_URL = "http://127.0.0.1:8917"
SUBJECTS = ("a lighthouse", "prime numbers", "sourdough bread", "the Moon", "a shy dragon")
TASKS = ("Explain", "Write a short story about", "List ten facts about", "Write a poem about")


@dataclass(frozen=True)
class Timing:
    """One request: when its first chunk came, and its last. Seconds since its start."""

    first_s: float
    last_s: float


def prompt(number: int) -> str:
    return f"{TASKS[number % len(TASKS)]} {SUBJECTS[number % len(SUBJECTS)]}. ({number})"


async def one(client: httpx.AsyncClient, number: int) -> Timing:
    body = {
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                "content"
            ):
                first = first or time.perf_counter() - started
    assert first is not None, "no text came"
    return Timing(first, time.perf_counter() - started)


async def measure(url: str, concurrency: int, salt: int) -> tuple[float, list[Timing]]:
    """Tokens per second of one wave of `concurrency` requests, and their timings."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        started = time.perf_counter()
        numbers = range(salt, salt + concurrency)  # new prompts each time: no prefix hits
        timings = await asyncio.gather(*(one(client, number) for number in numbers))
        elapsed = time.perf_counter() - started
    return concurrency * NUM_TOKENS / elapsed, list(timings)


@contextlib.contextmanager
def own_server(flags: str) -> Iterator[str]:
    """A server with these flags; its URL, once it is ready."""
    adaflash = Path(sys.executable).with_name("adaflash")
    port = OWN_URL.rsplit(":", 1)[1]
    command = [str(adaflash), "serve", "--port", port, "--no-access-log", *shlex.split(flags)]
    process = subprocess.Popen(command)
    try:
        while True:
            time.sleep(0.2)
            if process.poll() is not None:
                sys.exit("the server did not start")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(OWN_URL + "/ready").status_code == 200:
                    break
        yield OWN_URL
    finally:
        process.terminate()
        process.wait()


def run_rounds(url: str, levels: list[int], rounds: int) -> None:
    rates: dict[int, list[float]] = {level: [] for level in levels}
    timings: dict[int, list[Timing]] = {level: [] for level in levels}
    asyncio.run(measure(url, max(levels), 0))  # warm-up
    for round_number in range(rounds):
        for level in levels:
            rate, seen = asyncio.run(measure(url, level, 1000 * (round_number + 1) + level))
            rates[level].append(rate)
            timings[level] += seen
    print("concurrency  tokens/s (min .. max)      TTFT ms  ms per token")
    for level in levels:
        low, middle, high = min(rates[level]), statistics.median(rates[level]), max(rates[level])
        ttft = statistics.mean(t.first_s for t in timings[level]) * 1e3
        tpot = 1e3 * statistics.mean(
            (t.last_s - t.first_s) / (NUM_TOKENS - 1) for t in timings[level]
        )
        print(f"{level:>11}  {middle:7.1f} ({low:.1f} .. {high:.1f})  {ttft:9.0f}  {tpot:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--flags", default="")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    levels = [int(level) for level in options.concurrency.split(",")]
    server = contextlib.nullcontext(options.url) if options.url else own_server(options.flags)
    with server as url:
        run_rounds(url, levels, options.rounds)


if __name__ == "__main__":
    main()
