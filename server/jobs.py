"""From validated bodies to jobs."""

from adaflash.engine.errors import InvalidRequestError
from adaflash.engine.types import SamplingParams
from adaflash.server.context import AppContext
from adaflash.server.envelope import Envelope
from adaflash.server.generate import Job
from adaflash.server.prompts import chat_prompt, completion_prompts
from adaflash.server.sampling import check_max_tokens, room_for_output, sampling_params
from adaflash.server.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions


async def chat_job(body: ChatCompletionRequest, head: Envelope, context: AppContext) -> Job:
    """Raises InvalidRequestError."""
    prompt = await chat_prompt(body.messages, context)
    room = room_for_output(len(prompt), context.engine.facts, "messages")
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    if asked is not None:
        check_max_tokens(asked, room, param)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling = sampling_params(
        body,
        context.engine.facts,
        max_tokens=asked or room,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _job(body, head, [prompt], sampling, context)


async def completion_job(body: CompletionRequest, head: Envelope, context: AppContext) -> Job:
    """Raises InvalidRequestError."""
    prompts = await completion_prompts(body, context)
    room = min(room_for_output(len(prompt), context.engine.facts, "prompt") for prompt in prompts)
    if body.max_tokens is not None:
        check_max_tokens(body.max_tokens, room, "max_tokens")
    sampling = sampling_params(
        body,
        context.engine.facts,
        max_tokens=body.max_tokens or min(room, max(COMPLETION_MAX_TOKENS, body.min_tokens or 0)),
        num_logprobs=body.logprobs,
    )
    return _job(body, head, prompts, sampling, context)


def _job(
    body: SamplingFields,
    head: Envelope,
    prompts: list[list[int]],
    sampling: SamplingParams,
    context: AppContext,
) -> Job:
    num_choices = body.n or 1
    if num_choices > context.options.max_choices:
        raise InvalidRequestError(
            f"n is {num_choices}, and this server allows {context.options.max_choices}", param="n"
        )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Job(
        request_id=head.request_id,
        arrival_s=head.arrival_s,
        prompts=prompts,
        sampling=sampling,
        stop=stop,
        num_choices=num_choices,
        priority=body.priority or 0,
        return_speculation=bool(body.return_speculation),
        may_learn=head.may_learn,
    )
