"""Output tokens per second of a running server at several concurrencies, alternating, in rounds.

    python bench/concurrency.py --url http://127.0.0.1:8000 [--concurrency 1,8,32] [--rounds 3]

Closed loop, streaming, temperature 0, `ignore_eos`; the client runs on the server's machine.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

NUM_TOKENS = 128
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    levels = [int(level) for level in options.concurrency.split(",")]
    rates: dict[int, list[float]] = {level: [] for level in levels}
    timings: dict[int, list[Timing]] = {level: [] for level in levels}
    asyncio.run(measure(options.url, max(levels), 0))  # warm-up
    for round_number in range(options.rounds):
        for level in levels:
            salt = 1000 * (round_number + 1) + level
            rate, seen = asyncio.run(measure(options.url, level, salt))
            rates[level].append(rate)
            timings[level] += seen
    print("concurrency  tokens/s (min .. max)      TTFT ms  ms per token")
    for level in levels:
        low, middle, high = min(rates[level]), statistics.median(rates[level]), max(rates[level])
        ttft = statistics.mean(t.first_s for t in timings[level]) * 1e3
        tpot = statistics.mean((t.last_s - t.first_s) / (NUM_TOKENS - 1) for t in timings[level])
        print(
            f"{level:>11}  {middle:7.1f} ({low:.1f} .. {high:.1f})  {ttft:9.0f}  {tpot * 1e3:8.1f}"
        )


if __name__ == "__main__":
    main()
