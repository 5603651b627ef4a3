"""An engine that needs no model: for testing what is built on the HTTP API.

It answers with the prompt's own tokens over and over, and finds each of them equally likely.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from adaflash.engine.errors import EngineDownError, QueueFullError
from adaflash.engine.messages import DraftedBy, EngineFacts, TokenDelta
from adaflash.engine.types import FinishReason, Request, TokenLogprobs
from adaflash.server.engine_client import TokenStream

FACTS = EngineFacts(
    pid=0,
    vocab_size=272,
    max_model_len=512,
    num_pages=256,
    page_size=16,
    dtype="none",
    device="none",
    num_threads=0,
    attention="none",
    load_s=0.0,
)


@dataclass
class FakeEngineClient:
    """See EngineClient. The fields can be changed while it is in use."""

    served_facts: EngineFacts = FACTS
    is_alive: bool = True
    is_advancing: bool = True
    max_in_flight: int = 64
    delta_s: float = 0.0  # pause before each delta
    tokens_per_delta: int = 1
    # Drafts verified for each delta after the first; all its tokens but the last are accepted
    # drafts. None: deltas say nothing of drafts.
    drafts_per_delta: int | None = None
    dies_after: int | None = None  # tokens of a stream before it fails; None: it lives
    aborted: list[str] = field(default_factory=list)  # ids of requests that were given up
    submitted: list[Request] = field(default_factory=list)
    _in_flight: set[str] = field(default_factory=set)

    @property
    def facts(self) -> EngineFacts:
        if not self.is_alive:
            raise EngineDownError("the fake engine is down")
        return self.served_facts

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> list[TokenStream]:
        if not self.is_alive:
            raise EngineDownError("the fake engine is down")
        if self.num_in_flight + len(requests) > self.max_in_flight:
            raise QueueFullError("the fake queue is full", retry_after_s=1)
        self.submitted += requests
        return [FakeStream(self, request) for request in requests]


class FakeStream:
    """See TokenStream."""

    def __init__(self, engine: FakeEngineClient, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._num_sent = 0
        self._ended = False
        engine._in_flight.add(request.request_id)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._ended:
            raise StopAsyncIteration
        await asyncio.sleep(self._engine.delta_s)
        dies_after = self._engine.dies_after
        if dies_after is not None and self._num_sent >= dies_after:
            self._end()
            raise EngineDownError("the fake engine died")
        first = self._num_sent == 0
        num_drafts = self._num_drafts()
        token_ids = self._next_tokens(self._num_tokens(num_drafts))
        last = self._num_sent == self._request.sampling.max_tokens
        if last:
            self._end()
        return TokenDelta(
            request_id=self._request.request_id,
            token_ids=token_ids,
            logprobs=self._logprobs(token_ids),
            finish_reason=FinishReason.LENGTH if last else None,
            num_cached_tokens=0 if first else None,
            queue_s=0.0 if first else None,
            num_drafts=num_drafts,
            num_accepted=0 if num_drafts is None else len(token_ids) - 1,
            drafted_by=DraftedBy.DRAFTER if num_drafts else None,
        )

    def _num_drafts(self) -> int | None:
        """None for the first delta, which follows the prompt."""
        asked = self._engine.drafts_per_delta
        if asked is None or self._num_sent == 0:
            return None
        return min(asked, self._num_left - 1)  # the target's own token comes after them

    def _num_tokens(self, num_drafts: int | None) -> int:
        most = self._num_left if self._engine.drafts_per_delta is None else (num_drafts or 0) + 1
        return min(self._engine.tokens_per_delta, most)

    @property
    def _num_left(self) -> int:
        return self._request.sampling.max_tokens - self._num_sent

    def _next_tokens(self, count: int) -> list[int]:
        start, prompt = self._num_sent, self._request.prompt_ids
        self._num_sent = start + count
        return [prompt[number % len(prompt)] for number in range(start, self._num_sent)]

    def _logprobs(self, token_ids: list[int]) -> list[TokenLogprobs] | None:
        count = self._request.sampling.num_logprobs
        if count is None:
            return None
        logprob = -math.log(self._engine.served_facts.vocab_size)
        top = [(token_id, logprob) for token_id in range(count)]
        return [TokenLogprobs(token_id, logprob, top) for token_id in token_ids]

    def abort(self) -> None:
        if not self._ended:
            self._engine.aborted.append(self._request.request_id)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._engine._in_flight.discard(self._request.request_id)
