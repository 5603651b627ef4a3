"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from contextlib import closing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from adaflash.engine.types import TokenLogprobs
from adaflash.server.answering import unless_client_leaves
from adaflash.server.context import AppContext, Context
from adaflash.server.generate import ChoiceDelta, Generation, counting_rejections, start
from adaflash.server.jobs import Envelope, chat_job, envelope, log_usage
from adaflash.server.requests import JsonRoute
from adaflash.server.responses import ChatCompletion
from adaflash.server.routes.documented import generation_responses
from adaflash.server.schemas import ChatCompletionRequest
from adaflash.server.sse import Event, EventStream
from adaflash.server.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion))
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a conversation, whole or as a stream."""
    with counting_rejections(context.metrics):
        head = envelope("chatcmpl", request, context.model_name(body.model), context)
        job = await chat_job(body, head, context)
        generation = start(job, context)
    log_usage(request, generation.usage)
    if body.stream:
        return EventStream(_events(body, head, generation, context), generation.close)
    with closing(generation):
        answer = await unless_client_leaves(request, _whole(head, generation, context))
    return JSONResponse(answer)


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
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(logprobs[index], context.tokenizer),
            "finish_reason": last[index].finish_reason,
            "stop_reason": last[index].stop_reason,
        }
        for index, text in enumerate(texts)
    ]
    usage = generation.usage.as_json()
    return head.as_json("chat.completion") | {"choices": choices, "usage": usage}


async def _events(
    body: ChatCompletionRequest, head: Envelope, generation: Generation, context: AppContext
) -> AsyncIterator[Event]:
    options = body.stream_options
    shell = head.as_json("chat.completion.chunk")

    def chunk(index: int, delta: Event, found: ChoiceDelta | None = None) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(found.logprobs, context.tokenizer) if found else None,
            "finish_reason": found.finish_reason if found else None,
        }
        if found is not None and found.finish_reason is not None:
            choice["stop_reason"] = found.stop_reason
        event = shell | {"choices": [choice]}
        if options is not None and options.continuous_usage_stats:
            event["usage"] = generation.usage.as_json()
        elif options is not None and options.include_usage:
            event["usage"] = None
        return event

    for index in range(len(generation.choices)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for found in generation:
        if found.text or found.logprobs or found.finish_reason is not None:
            yield chunk(found.index, {"content": found.text} if found.text else {}, found)
    if options is not None and options.include_usage:
        yield shell | {"choices": [], "usage": generation.usage.as_json()}


def chat_logprobs(found: list[TokenLogprobs], tokenizer: Tokenizer) -> Event | None:
    """OpenAI's chat shape; null if none were asked for."""
    if not found:
        return None

    def entry(token_id: int, logprob: float) -> Event:
        raw = tokenizer.token_bytes(token_id)
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*top) for top in token.top]}
        for token in found
    ]
    return {"content": content, "refusal": None}
