"""Many streams at once: each gets the text it would get alone, and nothing is left behind."""

import asyncio
import time
from dataclasses import dataclass

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.running_server import RunningServer

NUM_STREAMS = 64
NUM_TOKENS = 128


@dataclass(frozen=True)
class Streamed:
    """What one stream brought."""

    text: str
    token_bytes: list[list[int] | None]
    finish_reason: str | None


async def stream(client: AsyncOpenAI, number: int, temperature: float) -> Streamed:
    text, token_bytes, reasons = "", [], []
    chunks = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"{number} " * (number % 7 + 1)}],
        max_tokens=NUM_TOKENS,
        temperature=temperature,
        seed=number,
        logprobs=True,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        if choice.logprobs is not None and choice.logprobs.content:
            token_bytes += [token.bytes for token in choice.logprobs.content]
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    (reason,) = reasons
    return Streamed(text, token_bytes, reason)


async def run_streams(url: str, temperature: float) -> tuple[list[Streamed], list[Streamed]]:
    """All streams at once, then each alone."""
    async with AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        numbers = range(NUM_STREAMS)
        together = await asyncio.gather(*(stream(client, n, temperature) for n in numbers))
        alone = [await stream(client, n, temperature) for n in numbers]
    return list(together), alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_64_streams_equal_the_same_requests_alone(
    server: RunningServer, temperature: float
) -> None:
    asyncio.run(run_streams(server.url, temperature))  # warm: libraries allocate at first use
    memory = server.memory()
    together, alone = asyncio.run(run_streams(server.url, temperature))
    assert together == alone
    assert all(len(result.token_bytes) == NUM_TOKENS for result in together)
    assert all(result.finish_reason == "length" for result in together)
    if temperature > 0:
        assert len({result.text for result in together}) > NUM_STREAMS // 2
    assert_pages_return(server)
    assert server.memory() < memory + 16 * 2**20


def test_a_disconnect_frees_the_pages(server: RunningServer) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 900,
    }
    aborted = server.metric("adaflash_request_success_total", finished_reason="abort")
    steps = server.metric("adaflash_step_duration_seconds_count")
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        # Text has come, so the request runs and holds pages.
        next(line for line in response.iter_lines() if '"content": "' in line.replace('""', ""))
    assert_pages_return(server)
    # It did not just run to its end.
    assert server.metric("adaflash_step_duration_seconds_count") < steps + 450
    now = server.metric("adaflash_request_success_total", finished_reason="abort")
    assert now == aborted + 1


def assert_pages_return(server: RunningServer) -> None:
    """Pages of ended requests are given back; gauges follow with the next step's report."""
    deadline = time.monotonic() + 10
    while server.metric("adaflash_kv_cache_usage_perc") > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("adaflash_kv_cache_usage_perc") == 0
    assert server.metric("adaflash_num_requests_running") == 0
    assert server.metric("adaflash_num_requests_waiting") == 0
