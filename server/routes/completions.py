"""POST /v1/completions."""

import codecs
from collections import defaultdict

from fastapi import APIRouter, Request, Response

from adaflash.engine.types import TokenLogprobs
from adaflash.server.answers import WholeChoice, respond
from adaflash.server.bodies import JsonRoute
from adaflash.server.context import Context
from adaflash.server.envelope import envelope
from adaflash.server.generate import ChoiceDelta, counting_rejections, start
from adaflash.server.jobs import completion_job
from adaflash.server.responses import Completion
from adaflash.server.routes.documented import generation_responses
from adaflash.server.schemas import CompletionRequest
from adaflash.server.sse import Event
from adaflash.server.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=generation_responses(Completion))
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    """Continue one or several texts, whole or as a stream."""
    with counting_rejections(context.metrics):
        head = envelope("cmpl", request, context.model_name(body.model), context)
        generation = start(await completion_job(body, head, context), context)
    return await respond(generation, body, request, head, CompletionFormat(context.tokenizer))


class CompletionFormat:
    """See AnswerFormat."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._written: defaultdict[int, _Written] = defaultdict(_Written)  # by choice

    def whole(self, choice: WholeChoice) -> Event:
        assert choice.last is not None
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.index, choice.logprobs),
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }

    def opening(self, index: int) -> None:
        return None

    def chunk(self, delta: ChoiceDelta) -> Event:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, index: int, found: list[TokenLogprobs]) -> Event | None:
        """OpenAI's older shape, with each token's offset in the text; null if not asked for."""
        if not found:
            return None
        raw = self._tokenizer.token_bytes
        written = self._written[index]
        return {
            "tokens": [_name(raw(token.token_id)) for token in found],
            "token_logprobs": [token.logprob for token in found],
            "top_logprobs": [{_name(raw(id_)): value for id_, value in t.top} for t in found],
            "text_offset": [written.offset_of(raw(token.token_id)) for token in found],
        }


class _Written:
    """How many whole characters the tokens of a choice have made so far."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def offset_of(self, token: bytes) -> int:
        """Where the next token starts in the text."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(token))
        return offset


def _name(token: bytes) -> str:
    """A token's text, or OpenAI's form for bytes that are no whole character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
