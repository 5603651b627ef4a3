"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from adaflash.engine.types import TokenLogprobs
from adaflash.server.answers import WholeChoice, respond
from adaflash.server.bodies import JsonRoute
from adaflash.server.context import Context
from adaflash.server.envelope import envelope
from adaflash.server.generate import ChoiceDelta, counting_rejections, start
from adaflash.server.jobs import chat_job
from adaflash.server.responses import ChatCompletion
from adaflash.server.routes.documented import generation_responses
from adaflash.server.schemas import ChatCompletionRequest
from adaflash.server.sse import Event
from adaflash.server.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion))
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a conversation, whole or as a stream."""
    with counting_rejections(context.metrics):
        head = envelope("chatcmpl", request, context.model_name(body.model), context)
        generation = start(await chat_job(body, head, context), context)
    chat = ChatFormat(context.tokenizer, with_logprobs=bool(body.logprobs))
    return await respond(generation, body, request, head, chat)


class ChatFormat:
    """See AnswerFormat."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def whole(self, choice: WholeChoice) -> Event:
        assert choice.last is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if self._with_logprobs else None,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }

    def opening(self, index: int) -> Event:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: ChoiceDelta) -> Event:
        choice: Event = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def _logprobs(self, found: list[TokenLogprobs]) -> Event:
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(*top) for top in token.top]}
            for token in found
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Event:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
