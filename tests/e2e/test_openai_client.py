"""The contract with the official openai client, against a real server."""

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.e2e.running_server import RunningServer

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def chat(client: OpenAI, **fields: object) -> ChatCompletion:
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, **fields}
    answer = client.chat.completions.create(**given)  # type: ignore[call-overload]
    assert isinstance(answer, ChatCompletion)
    return answer


def text(answer: ChatCompletion) -> str:
    content = answer.choices[0].message.content
    assert content is not None
    return content


def test_chat(client: OpenAI) -> None:
    answer = chat(client, extra_body={"ignore_eos": True})
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, n: int) -> None:
    common = {"n": n, "temperature": 1.0, "seed": 7, "max_tokens": 40}
    whole = chat(client, **common)
    texts, usages = [""] * n, []
    reasons: list[str | None] = [None] * n
    chunks = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        n=n,
        temperature=1.0,
        seed=7,
        max_tokens=40,
    )
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        if chunk.usage is not None:
            usages.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    (usage,) = usages
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_choices_differ_and_the_first_is_that_of_n_1(client: OpenAI) -> None:
    common = {"temperature": 1.0, "seed": 11, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    several = [choice.message.content for choice in chat(client, n=4, **common).choices]
    assert len(set(several)) == 4
    assert text(chat(client, **common)) == several[0]


def test_a_seed_reproduces_and_another_does_not(client: OpenAI) -> None:
    common = {"temperature": 1.0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    first = text(chat(client, seed=5, **common))
    assert text(chat(client, seed=5, **common)) == first
    assert text(chat(client, seed=-5, **common)) != first
    assert text(chat(client, **common)) != text(chat(client, **common))


def test_logprobs(client: OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert token.logprob < 0
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert joined.decode(errors="replace") == text(answer)


def test_stop_strings_end_the_text_before_them(client: OpenAI) -> None:
    common = {"extra_body": {"ignore_eos": True}, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    whole = text(chat(client, **common))
    pairs = [whole[start : start + 2] for start in range(5, len(whole) - 2)]
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    cut = chat(client, stop=[stop, "never seen"], **common)
    assert text(cut) == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra == {"stop_reason": stop}
    streamed = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stop=stop,
        temperature=1.0,
        seed=3,
        max_tokens=60,
        extra_body={"ignore_eos": True},
    )
    pieces = [choice.delta.content or "" for chunk in streamed for choice in chunk.choices]
    assert "".join(pieces) == text(cut)


def test_stop_token_ids_and_their_reason(client: OpenAI) -> None:
    answer = chat(client, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": 65}
    assert text(answer) == ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize(
    "prompt", ["Once upon", ["Once upon", "A time"], [10, 11, 12], [[10, 11], [12, 13]]]
)
def test_completions_take_four_shapes_of_prompt(client: OpenAI, prompt: object) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,  # type: ignore[call-overload]
        temperature=0,
        n=2,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert isinstance(answer, Completion)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer.choices) == (4 if several else 2)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert answer.choices[0].text == answer.choices[1].text  # greedy
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == 16  # OpenAI's default length


def test_a_prefix_hit_shows_in_the_usage(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "A long question, asked twice. " * 4}]
    for expected_hit in (False, True):
        usage = chat(client, messages=messages).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert (cached > 0) == expected_hit
        assert cached < usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_report_of_drafts_adds_up_to_the_usage(client: OpenAI, stream: bool) -> None:
    extra = {"ignore_eos": True, "return_speculation": True}
    if stream:
        chunks = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, stream=True, extra_body=extra
        )
        extras = [choice.model_extra for chunk in chunks for choice in chunk.choices]
    else:
        extras = [choice.model_extra for choice in chat(client, extra_body=extra).choices]
    (report,) = [extra["adaflash"] for extra in extras if extra and "adaflash" in extra]
    steps = len(report["accepted"])
    assert len(report["verify_lengths"]) == steps
    assert 1 + steps + sum(report["accepted"]) == 12  # one token comes from the prompt's step


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "adaflash"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own_kinds(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-4")
