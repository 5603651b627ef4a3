"""What the HTTP API takes. Strict: wrong types and unknown fields are refused, never guessed."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

MAX_FIELDS = 256  # of one object

# Every collection fails fast: a million wrong items are one error, not a million error objects.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Schema(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return given


def only(*neutral: JsonValue) -> AfterValidator:
    """For fields of other servers that are not supported yet: null and neutral values pass.

    Ignoring them would give another answer than the one that was asked for.
    """

    def check(value: JsonValue) -> JsonValue:
        if value is not None and value not in neutral:
            raise ValueError("this field is not supported by this server yet")
        return value

    return AfterValidator(check)


class StreamOptions(Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Schema):
    """What chat and text completions share. null means: as if left out."""

    model: str | None = Field(None, description="A name from /v1/models; left out: the only one.")
    max_tokens: Count | None = None
    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy; default 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: the whole vocabulary.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = (
        None
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, allow_inf_nan=False)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
            Field(max_length=1024, fail_fast=True),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower goes first; default 0."
    )
    return_speculation: bool | None = Field(
        None, description="Add to each choice, as `adaflash`, how its drafts fared."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # These change nothing here and are taken from clients that send them.
    user: str | None = None
    metadata: JsonValue = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    skip_special_tokens: Annotated[JsonValue, only(True)] = None
    spaces_between_special_tokens: Annotated[JsonValue, only(True, False)] = None

    # These would change the answer.
    response_format: Annotated[JsonValue, only({"type": "text"})] = None
    structured_outputs: Annotated[JsonValue, only()] = None
    guided_json: Annotated[JsonValue, only()] = None
    guided_regex: Annotated[JsonValue, only()] = None
    guided_choice: Annotated[JsonValue, only()] = None
    guided_grammar: Annotated[JsonValue, only()] = None
    best_of: Annotated[JsonValue, only(1)] = None
    echo: Annotated[JsonValue, only(False)] = None
    use_beam_search: Annotated[JsonValue, only(False)] = None
    length_penalty: Annotated[JsonValue, only(1)] = None
    prompt_logprobs: Annotated[JsonValue, only()] = None
    allowed_token_ids: Annotated[JsonValue, only()] = None
    bad_words: Annotated[JsonValue, only([])] = None
    truncate_prompt_tokens: Annotated[JsonValue, only()] = None
    include_stop_str_in_output: Annotated[JsonValue, only(False)] = None
    logits_processors: Annotated[JsonValue, only([])] = None


class TextPart(Schema):
    type: Literal["text"]
    text: str


class ChatMessage(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=8192, fail_fast=True)]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[JsonValue, only([])] = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=8192, fail_fast=True)]


class ChatCompletionRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    reasoning_effort: Annotated[JsonValue, only("none")] = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[JsonValue, only([])] = None
    tool_choice: Annotated[JsonValue, only("none", "auto")] = None
    functions: Annotated[JsonValue, only([])] = None
    function_call: Annotated[JsonValue, only("none", "auto")] = None
    modalities: Annotated[JsonValue, only(["text"])] = None
    audio: Annotated[JsonValue, only()] = None
    web_search_options: Annotated[JsonValue, only()] = None
    chat_template: Annotated[JsonValue, only()] = None
    chat_template_kwargs: Annotated[JsonValue, only({})] = None
    add_generation_prompt: Annotated[JsonValue, only(True)] = None
    continue_final_message: Annotated[JsonValue, only(False)] = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=128, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: Annotated[JsonValue, only("")] = None


class TokenizeRequest(Schema):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
