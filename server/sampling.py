"""From a validated body to the engine's sampling parameters, limits checked."""

import hashlib
import secrets

from adaflash.engine.errors import InvalidRequestError
from adaflash.engine.messages import EngineFacts
from adaflash.engine.types import SamplingParams
from adaflash.server.errors import shorten
from adaflash.server.schemas import SamplingFields

GREEDY_BELOW = 1e-5  # temperatures this small are greedy; dividing by them would overflow


def sampling_params(
    body: SamplingFields,
    facts: EngineFacts,
    *,
    max_tokens: int,
    num_logprobs: int | None,
) -> SamplingParams:
    """The parameters of choice 0. Raises InvalidRequestError."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens"
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    stop_token_ids = body.stop_token_ids or []
    check_token_ids(stop_token_ids, facts, "stop_token_ids")
    return SamplingParams(
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(body.top_k, facts.vocab_size) if body.top_k and body.top_k > 0 else None,
        min_p=body.min_p or 0.0,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body.logit_bias or {}, facts),
        num_logprobs=num_logprobs,
    )


def seed_of_choice(seed: int, choice: int) -> int:
    """Choice 0 keeps the seed, so that it is what a request with n = 1 gets; others mix it."""
    if choice == 0:
        return seed
    mixed = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little")


def room_for_output(prompt_len: int, facts: EngineFacts, param: str) -> int:
    """Tokens that can follow the prompt. Raises InvalidRequestError if there are none."""
    room = facts.max_model_len - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens, and the context of {facts.max_model_len} must "
            "hold at least one more",
            param=param,
        )
    return room


def check_max_tokens(asked: int, room: int, param: str) -> None:
    if asked > room:
        raise InvalidRequestError(
            f"{param} is {asked}, but the prompt leaves {room} tokens of the context", param=param
        )


def check_token_ids(token_ids: list[int], facts: EngineFacts, param: str) -> None:
    """Raise InvalidRequestError for ids that the model does not have."""
    for token_id in token_ids:
        if token_id >= facts.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is out of range: "
                f"the vocabulary has {facts.vocab_size} tokens",
                param=param,
            )


def _logit_bias(given: dict[str, float], facts: EngineFacts) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError(
                f"logit_bias: {shorten(key)!r} is no token id; use numbers", param="logit_bias"
            )
        bias[int(key)] = value
    check_token_ids(list(bias), facts, "logit_bias")
    return bias
