"""From texts and messages to prompt token ids, limits checked, off the event loop."""

import asyncio
from collections.abc import Sequence

from adaflash.engine.errors import InvalidRequestError
from adaflash.server.context import AppContext
from adaflash.server.sampling import check_token_ids
from adaflash.server.schemas import ChatMessage, CompletionRequest


async def chat_prompt(messages: Sequence[ChatMessage], context: AppContext) -> list[int]:
    """Render the chat template and tokenise. Raises InvalidRequestError."""
    return await asyncio.to_thread(_render, messages, context)


async def completion_prompts(body: CompletionRequest, context: AppContext) -> list[list[int]]:
    """One list of token ids per prompt. Raises InvalidRequestError."""
    texts, token_lists = _split_kinds(body.prompt)
    for token_ids in token_lists:
        check_token_ids(token_ids, context.engine.facts, "prompt")
    encoded = [await asyncio.to_thread(encode, text, context, "prompt") for text in texts]
    prompts = encoded + token_lists
    if not prompts or not all(prompts):
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return prompts


def encode(
    text: str, context: AppContext, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Tokenise a text that can fit the context. Raises InvalidRequestError for longer ones."""
    limit = context.engine.facts.max_model_len
    if len(text) > limit * context.tokenizer.longest_token:
        raise InvalidRequestError(
            f"{param} has {len(text):,} characters, more than a context of {limit:,} tokens holds",
            param=param,
        )
    token_ids = context.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    # Some tokenizers know tokens that their model has no embedding for.
    check_token_ids(token_ids, context.engine.facts, param)
    return token_ids


def _render(messages: Sequence[ChatMessage], context: AppContext) -> list[int]:
    template = context.tokenizer.chat_template
    if template is None:
        raise InvalidRequestError(
            "the model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE"
        )
    text = template.render([_for_template(message) for message in messages])
    # The template writes special tokens out itself.
    prompt = encode(text, context, "messages", add_special_tokens=False)
    if not prompt:
        raise InvalidRequestError("the chat template renders to nothing", param="messages")
    return prompt


def _for_template(message: ChatMessage) -> dict[str, object]:
    # Templates know OpenAI's newer word for system messages seldom.
    role = "system" if message.role == "developer" else message.role
    more = {"name": message.name, "tool_call_id": message.tool_call_id}
    given = {key: value for key, value in more.items() if value is not None}
    return {"role": role, "content": message.text, **given}


def _split_kinds(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[list[str], list[list[int]]]:
    """Texts and token lists; of the four shapes a prompt can have, only one of them is filled."""
    if isinstance(prompt, str):
        return [prompt], []
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    ids = [item for item in prompt if isinstance(item, int)]
    return texts, lists + ([ids] if ids else [])
