"""Reading request bodies: bounded, and parsed so that no input can bring the server down."""

import json
from collections.abc import Callable, Coroutine

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from adaflash.server.context import context_of
from adaflash.server.errors import RequestTooLargeError

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
        async for chunk in self.stream():
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
