"""The server's side of the engine: submit requests, get streams of token deltas."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from adaflash.engine.messages import EngineFacts, TokenDelta
from adaflash.engine.types import Request

ENGINE_DOWN = "the engine is not running; it is being restarted"


class TokenStream(Protocol):
    """The deltas of one request, in order; the last one carries the finish reason."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta:
        """Raises EngineDownError when the engine died before the request ended."""
        ...

    def abort(self) -> None:
        """Give the request up: its pages are free within a step. Harmless once it has ended."""
        ...


class EngineClient(Protocol):
    """What the HTTP routes know of the engine. server/fake_engine.py is another one, for tests."""

    @property
    def facts(self) -> EngineFacts:
        """What the running engine reported at its start. Raises EngineDownError if it is down."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is up (for /health)."""
        ...

    @property
    def is_advancing(self) -> bool:
        """Whether steps advance while there is work (for /ready)."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[TokenStream]:
        """Admit all of `requests` or none, and return their streams in order.

        Raises QueueFullError when they do not fit in the bounded queue now, InvalidRequestError
        when they never will, EngineDownError when the engine is not up.
        """
        ...
