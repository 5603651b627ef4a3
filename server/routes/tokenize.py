"""POST /tokenize and /detokenize."""

import asyncio

from fastapi import APIRouter

from adaflash.engine.errors import InvalidRequestError
from adaflash.server.bodies import JsonRoute
from adaflash.server.context import Context
from adaflash.server.prompts import chat_prompt, encode
from adaflash.server.responses import Text, Tokens
from adaflash.server.routes.documented import errors
from adaflash.server.sampling import check_token_ids
from adaflash.server.schemas import DetokenizeRequest, TokenizeRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", responses=errors(400, 401, 404, 503))
async def tokenize(body: TokenizeRequest, context: Context) -> Tokens:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    context.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await chat_prompt(body.messages, context)
    else:
        tokens = await asyncio.to_thread(
            encode,
            body.prompt or "",
            context,
            "prompt",
            add_special_tokens=body.add_special_tokens,
        )
    limit = context.engine.facts.max_model_len
    return Tokens(count=len(tokens), max_model_len=limit, tokens=tokens)


@router.post("/detokenize", responses=errors(400, 401, 404, 503))
async def detokenize(body: DetokenizeRequest, context: Context) -> Text:
    """The text of token ids, special tokens included."""
    context.model_name(body.model)
    check_token_ids(body.tokens, context.engine.facts, "tokens")
    text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Text(prompt=text)
