"""What the HTTP API answers: the shapes of OpenAI's API, for the OpenAPI document."""

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]
ON_REQUEST = "Only with `return_speculation`; a stream has it in a choice's last chunk."


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class Speculation(BaseModel):
    """How the drafts of one choice fared. The lists have an entry for each decode step."""

    verify_lengths: list[int] = Field(description="Drafts that the model verified; 0: none.")
    accepted: list[int] = Field(
        description="Of them, those accepted and kept in the answer: a stop string may cut some."
    )
    mean_accepted_length: float | None = Field(
        description="1 (the model's own token) + the mean of `accepted`; null if there was no "
        "decode step, as the first token comes from the prompt's."
    )


class ChatAnswer(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    adaflash: Speculation | None = Field(None, description=ON_REQUEST)


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    adaflash: Speculation | None = Field(None, description=ON_REQUEST)


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    prompt: str


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str
