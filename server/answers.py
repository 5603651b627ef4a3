"""How a generation becomes an HTTP answer, whole or as a stream, in the shapes of either API."""

from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from adaflash.engine.types import TokenLogprobs
from adaflash.server.disconnects import unless_client_leaves
from adaflash.server.envelope import Envelope, log_usage
from adaflash.server.generate import ChoiceDelta, Generation
from adaflash.server.schemas import SamplingFields, StreamOptions
from adaflash.server.sse import Event, EventStream


@dataclass
class WholeChoice:
    """All deltas of one choice together."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: ChoiceDelta | None = None  # the one with the finish reason, in the end

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.last = delta


class AnswerFormat(Protocol):
    """How one API writes choices. Made anew for every answer: it may remember what it wrote."""

    whole_kind: str
    chunk_kind: str

    def whole(self, choice: WholeChoice) -> Event: ...

    def chunk(self, delta: ChoiceDelta) -> Event: ...

    def opening(self, index: int) -> Event | None:
        """What a stream says of a choice before its first token, if anything."""
        ...


async def respond(
    generation: Generation,
    body: SamplingFields,
    request: Request,
    head: Envelope,
    answer_format: AnswerFormat,
) -> Response:
    """The answer to `request`, as its body asks for it. Ends the generation in any case."""
    log_usage(request, generation.usage)
    if body.stream:
        options = body.stream_options or StreamOptions()
        events = _events(generation, head, answer_format, options)
        return EventStream(events, generation.close)
    with closing(generation):
        answer = _whole(generation, head, answer_format)
        return JSONResponse(await unless_client_leaves(request, answer))


async def _whole(generation: Generation, head: Envelope, answer_format: AnswerFormat) -> Event:
    choices = [WholeChoice(index) for index in range(len(generation.choices))]
    async for delta in generation:
        choices[delta.index].add(delta)
    return head.as_json(answer_format.whole_kind) | {
        "choices": [answer_format.whole(choice) | _speculation(choice.last) for choice in choices],
        "usage": generation.usage.as_json(),
    }


async def _events(
    generation: Generation, head: Envelope, answer_format: AnswerFormat, options: StreamOptions
) -> AsyncGenerator[Event, None]:
    shell = head.as_json(answer_format.chunk_kind)

    def event(choice: Event) -> Event:
        if options.continuous_usage_stats:
            return shell | {"choices": [choice], "usage": generation.usage.as_json()}
        if options.include_usage:
            return shell | {"choices": [choice], "usage": None}
        return shell | {"choices": [choice]}

    for index in range(len(generation.choices)):
        opening = answer_format.opening(index)
        if opening is not None:
            yield event(opening)
    async for delta in generation:
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            yield event(answer_format.chunk(delta) | _speculation(delta))
    if options.include_usage:
        yield shell | {"choices": [], "usage": generation.usage.as_json()}


def _speculation(last: ChoiceDelta | None) -> Event:
    """What a choice says of its drafts at its end, if that was asked for."""
    if last is None or last.speculation is None:
        return {}
    return {"adaflash": last.speculation.as_json()}
