"""POST /v1/completions."""

from collections.abc import AsyncIterator
from contextlib import closing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from adaflash.engine.types import TokenLogprobs
from adaflash.server.answering import unless_client_leaves
from adaflash.server.context import AppContext, Context
from adaflash.server.generate import ChoiceDelta, Generation, counting_rejections, start
from adaflash.server.jobs import Envelope, completion_job, envelope, log_usage
from adaflash.server.requests import JsonRoute
from adaflash.server.responses import Completion
from adaflash.server.routes.documented import generation_responses
from adaflash.server.schemas import CompletionRequest
from adaflash.server.sse import Event, EventStream
from adaflash.server.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=generation_responses(Completion))
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    """Continue one or several texts, whole or as a stream."""
    with counting_rejections(context.metrics):
        head = envelope("cmpl", request, context.model_name(body.model), context)
        job = await completion_job(body, head, context)
        generation = start(job, context)
    log_usage(request, generation.usage)
    if body.stream:
        return EventStream(_events(body, head, generation, context), generation.close)
    with closing(generation):
        answer = await unless_client_leaves(request, _whole(head, generation, context))
    return JSONResponse(answer)


class _Logprobs:
    """OpenAI's older shape, with each token's offset in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def render(self, found: list[TokenLogprobs]) -> Event | None:
        """The next tokens; null if none were asked for."""
        if not found:
            return None
        name = self._tokenizer.token_text
        tokens = [name(token.token_id) for token in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [token.logprob for token in found],
            "top_logprobs": [{name(id_): value for id_, value in token.top} for token in found],
            "text_offset": offsets,
        }


async def _whole(head: Envelope, generation: Generation, context: AppContext) -> Event:
    texts = [""] * len(generation.choices)
    logprobs: list[list[TokenLogprobs]] = [[] for _ in generation.choices]
    last: dict[int, ChoiceDelta] = {}
    async for delta in generation:
        texts[delta.index] += delta.text
        logprobs[delta.index] += delta.logprobs
        last[delta.index] = delta
    choices = [
        {
            "index": index,
            "text": text,
            "logprobs": _Logprobs(context.tokenizer).render(logprobs[index]),
            "finish_reason": last[index].finish_reason,
            "stop_reason": last[index].stop_reason,
        }
        for index, text in enumerate(texts)
    ]
    usage = generation.usage.as_json()
    return head.as_json("text_completion") | {"choices": choices, "usage": usage}


async def _events(
    body: CompletionRequest, head: Envelope, generation: Generation, context: AppContext
) -> AsyncIterator[Event]:
    options = body.stream_options
    shell = head.as_json("text_completion")
    logprobs = [_Logprobs(context.tokenizer) for _ in generation.choices]
    async for found in generation:
        if not (found.text or found.logprobs or found.finish_reason is not None):
            continue
        choice = {
            "index": found.index,
            "text": found.text,
            "logprobs": logprobs[found.index].render(found.logprobs),
            "finish_reason": found.finish_reason,
            "stop_reason": found.stop_reason,
        }
        event = shell | {"choices": [choice]}
        if options is not None and options.continuous_usage_stats:
            event["usage"] = generation.usage.as_json()
        elif options is not None and options.include_usage:
            event["usage"] = None
        yield event
    if options is not None and options.include_usage:
        yield shell | {"choices": [], "usage": generation.usage.as_json()}
