"""A client that leaves takes its work with it; so does a choice that has ended."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from adaflash.server.fake_engine import FakeEngineClient
from tests.server.app_client import HELLO, Served

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def listening(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `served` over real sockets: only there can it leave."""
    config = uvicorn.Config(served.app(), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            await task


async def until_in_flight(engine: FakeEngineClient, count: int) -> None:
    async with asyncio.timeout(5):
        while engine.num_in_flight != count:
            await asyncio.sleep(0.005)


def check_all_aborted(served: Served, count: int) -> None:
    submitted = {request.request_id for request in served.engine.submitted}
    assert len(submitted) == count
    assert set(served.engine.aborted) == submitted
    assert served.metric("adaflash_request_success_total", finished_reason="abort") == count


@pytest.mark.parametrize("delta_s", [0.01, 60.0])  # between tokens; before the first one
def test_a_stream_s_client_leaves(delta_s: float) -> None:
    served = Served(engine=FakeEngineClient(delta_s=delta_s))

    async def scenario() -> None:
        async with listening(served) as client:
            body = {"messages": HELLO, "stream": True, "n": 3}
            async with client.stream("POST", CHAT, json=body) as response:
                await anext(response.aiter_bytes())
                assert served.engine.num_in_flight == 3
            await until_in_flight(served.engine, 0)

    asyncio.run(scenario())
    check_all_aborted(served, 3)


def test_a_whole_answer_s_client_leaves() -> None:
    served = Served(engine=FakeEngineClient(delta_s=0.01))

    async def scenario() -> None:
        async with listening(served) as client:
            post = asyncio.create_task(client.post(CHAT, json={"messages": HELLO, "n": 3}))
            await until_in_flight(served.engine, 3)
            post.cancel()
            await until_in_flight(served.engine, 0)
            good = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
            assert good.status_code == 200

    asyncio.run(scenario())
    served.engine.submitted.pop()  # the last one, which nobody left
    check_all_aborted(served, 3)


def test_a_choice_that_meets_a_stop_string_does_not_wait_for_the_others() -> None:
    served = Served(engine=FakeEngineClient(delta_s=0.01))
    in_flight_at_stop: list[int] = []

    async def scenario() -> None:
        async with listening(served) as client:
            body = {"prompt": ["abc", "xyz"], "stop": "c", "max_tokens": 30, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        if choice["finish_reason"] == "stop":
                            in_flight_at_stop.append(served.engine.num_in_flight)

    asyncio.run(scenario())
    assert in_flight_at_stop == [1]
    assert served.metric("adaflash_request_success_total", finished_reason="stop") == 1
    assert served.metric("adaflash_request_success_total", finished_reason="length") == 1
