"""Server-sent events, framed."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adaflash.engine.errors import AdaFlashError
from adaflash.server.errors import error_body

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0  # proxies close connections on which nothing moves
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Event = dict[str, object]


def frame(event: Event) -> bytes:
    # ASCII, because some clients take U+2028 and U+0085 for the end of a line.
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends `events` and `[DONE]`; an error becomes the last event.

    `close` is called at the end in any case, also if the client left before the first event.
    """

    def __init__(self, events: AsyncGenerator[Event, None], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_frames(events), media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _frames(events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
    try:
        async for event in _with_pauses(events):
            yield KEEP_ALIVE if event is None else frame(event)
    except Exception as error:  # the status is sent, so the error is an event
        if not isinstance(error, AdaFlashError):
            log.exception("unexpected error in a stream", exc_info=error)
        yield frame(error_body(error))
    yield DONE


async def _with_pauses(events: AsyncGenerator[Event, None]) -> AsyncIterator[Event | None]:
    """The events, and None whenever none came for a while."""
    upcoming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield None
                continue
            event = upcoming.result()
            if event is None:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events, None))
    finally:
        # The client is gone, or all is sent: end the generator now, not when it is collected.
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()
