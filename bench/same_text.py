"""Many streams at once against each of them alone, on the default model in float32.

    python bench/same_text.py --url http://127.0.0.1:8000 [--streams 64] [--tokens 128]

The server has to run with --dtype float32. Prints how many texts are the same at temperature 0 and
0.8 (seeded), the pages in use afterwards, and the first difference if there is one. Slow: each
stream is also run alone. tests/e2e/test_streams.py does the same on a tiny model.
"""

import argparse
import asyncio
import json
import sys
import time

import httpx
from concurrency import prompt


async def text_of(client: httpx.AsyncClient, number: int, temperature: float, tokens: int) -> str:
    body = {
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return text


async def compare(url: str, streams: int, temperature: float, tokens: int) -> int:
    """Number of streams whose text differs from that of the same request alone."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        started = time.perf_counter()
        together = await asyncio.gather(
            *(text_of(client, number, temperature, tokens) for number in range(streams))
        )
        elapsed = time.perf_counter() - started
        print(f"temperature {temperature}: {streams} streams in {elapsed:.1f} s", flush=True)
        differing = 0
        for number, text in enumerate(together):
            alone = await text_of(client, number, temperature, tokens)
            if alone != text:
                differing += 1
                print(f"stream {number} differs:\n  together {text!r}\n  alone    {alone!r}")
    print(f"temperature {temperature}: {streams - differing} of {streams} the same", flush=True)
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    differing = 0
    for temperature in (0.0, 0.8):
        differing += asyncio.run(compare(options.url, options.streams, temperature, options.tokens))
    for line in httpx.get(options.url + "/metrics").text.splitlines():
        if line.startswith(("adaflash_kv_cache_usage_perc", "adaflash_num_requests_running")):
            print(line)
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
