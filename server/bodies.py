"""Reading request bodies: bounded, and parsed so that no input can bring the server down."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from adaflash.engine.errors import InvalidRequestError
from adaflash.server.context import context_of
from adaflash.server.errors import RequestTooLargeError

IDLE_S = 10.0  # a body that pauses longer is given up: it would hold up a shutdown
DRAIN_FACTOR = 8  # read this much more of a body that is too large, so that its sender gets to read


class JsonRequest(Request):
    """A request whose JSON is parsed by pydantic's parser: bounded depth, no NaN, no infinity."""

    async def json(self) -> object:
        content = await self.body()
        try:
            return pydantic_core.from_json(content, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error

    async def read_bounded(self, limit: int) -> None:
        """Read the body. Raises RequestTooLargeError if it is longer than `limit` bytes."""
        chunks: list[bytes] = []
        size = 0
        stream = self.stream()
        while (chunk := await _next_chunk(stream)) is not None:
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > limit * DRAIN_FACTOR:
                break
        if size > limit:
            raise RequestTooLargeError(
                f"the body is larger than the {limit:,} bytes that this server takes "
                "(--max-body-mib)"
            )
        self._body = b"".join(chunks)


async def _next_chunk(stream: AsyncGenerator[bytes, None]) -> bytes | None:
    """None at the end. Raises InvalidRequestError if nothing comes for a while."""
    try:
        async with asyncio.timeout(IDLE_S):
            return await anext(stream, None)
    except TimeoutError:
        raise InvalidRequestError(f"the rest of the body did not come within {IDLE_S} s") from None


class JsonRoute(APIRoute):
    """A route that reads its body through JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            bounded = JsonRequest(request.scope, request.receive)
            try:
                await bounded.read_bounded(context_of(request).options.max_body_bytes)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            return await handler(bounded)

        return read_then_handle
