"""Waiting for a whole answer, unless the client leaves first."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from fastapi import Request

AnswerT = TypeVar("AnswerT")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def unless_client_leaves(
    request: Request, work: Coroutine[object, object, AnswerT]
) -> AnswerT:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises ClientLeftError then.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def _left(request: Request) -> None:
    """Returns when the client has disconnected; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
