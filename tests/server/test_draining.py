"""Stopping in two stages: work in flight ends, new work is refused, nothing waits for ever."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from adaflash.server.draining import DrainingServer
from adaflash.server.lifecycle import Lifecycle


class Work:
    """An app whose one route answers when it is told to."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.may_end = asyncio.Event()
        self.num_started = 0
        self.was_aborted = False
        self.lifecycle = Lifecycle()
        self.app.get("/work")(self._work)

    async def _work(self) -> dict[str, bool]:
        self.num_started += 1
        if not self.lifecycle.draining:
            await self.may_end.wait()
        return {"draining": self.lifecycle.draining}

    def abort(self) -> None:
        self.was_aborted = True
        self.may_end.set()


@asynccontextmanager
async def running(
    work: Work, *, drain_timeout_s: float = 30
) -> AsyncIterator[tuple[DrainingServer, asyncio.Task[None], httpx.AsyncClient]]:
    """The server, its task, and a client of it."""
    listening = asyncio.Event()
    server = DrainingServer(
        work.app,
        work.lifecycle,
        abort_work=work.abort,
        drain_timeout_s=drain_timeout_s,
        on_listening=listening.set,
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await listening.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            yield server, task, client
        await task


async def until_started(work: Work) -> None:
    while not work.num_started:
        await asyncio.sleep(0.01)


def test_work_in_flight_ends_and_the_port_answers_meanwhile() -> None:
    async def scenario() -> None:
        work = Work()
        async with running(work) as (server, task, client):
            answer = asyncio.create_task(client.get("/work"))
            await until_started(work)
            server.stop()
            assert (await client.get("/work")).json() == {"draining": True}
            await asyncio.sleep(0.3)
            assert not task.done()
            work.may_end.set()
            assert (await answer).status_code == 200
            await task
        assert not work.was_aborted
        assert not server.was_hurried

    asyncio.run(scenario())


def test_an_idle_server_ends_at_once() -> None:
    async def scenario() -> None:
        async with running(Work()) as (server, task, client):
            await client.get("/nowhere")  # leaves a connection open
            server.stop()
            await task
            assert not server.was_hurried

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_work_is_aborted_when_its_time_is_up() -> None:
    async def scenario() -> None:
        work = Work()
        async with running(work, drain_timeout_s=0.2) as (server, task, client):
            answer = asyncio.create_task(client.get("/work"))
            await until_started(work)
            server.stop()
            await task
            assert work.was_aborted
            assert (await answer).status_code == 200

    asyncio.run(scenario())


def test_the_second_stop_aborts_the_work() -> None:
    async def scenario() -> None:
        work = Work()
        async with running(work) as (server, task, client):
            answer = asyncio.create_task(client.get("/work"))
            await until_started(work)
            server.stop()
            await asyncio.sleep(0.2)
            assert not work.was_aborted
            server.stop()
            await task
            assert work.was_aborted
            assert server.was_hurried
            assert (await answer).status_code == 200

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_work_that_cannot_be_aborted_is_left_behind() -> None:
    async def scenario() -> None:
        work = Work()
        async with running(work) as (server, task, client):
            server._abort_work = lambda: None  # as with an engine that hangs
            answer = asyncio.create_task(client.get("/work"))
            await until_started(work)
            server.stop()
            server.stop()
            await task
            assert not answer.done()
            answer.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
