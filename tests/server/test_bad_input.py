"""Bad input gets a clear 400, and the server goes on."""

import asyncio
import json

import httpx
import pytest
from pydantic import ValidationError

from adaflash.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Schema,
)
from tests.server.app_client import HELLO, Served, tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = json.dumps(HELLO)
DIGITS = [str(number) for number in range(100_000)]


def post(path: str, content: str | bytes) -> tuple[httpx.Response, httpx.Response]:
    """The answer to `content`, and to an ordinary request right after it."""

    async def run() -> tuple[httpx.Response, httpx.Response]:
        headers = {"Content-Type": "application/json"}
        async with Served().client() as client:
            bad = await client.post(path, content=content, headers=headers)
            good = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
        return bad, good

    return asyncio.run(run())


def refuse(path: str, content: str | bytes) -> dict[str, str | None]:
    bad, good = post(path, content)
    assert good.status_code == 200
    assert bad.status_code == 400, bad.text
    assert list(bad.json()) == ["error"]
    error = bad.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "1e400"),
        ("temperature", "-0.1"),
        ("temperature", "2.1"),
        ("temperature", '"1"'),
        ("temperature", "true"),
        ("top_p", "NaN"),
        ("top_p", "1e400"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("min_p", "2"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", "9223372036854775808"),
        ("max_tokens", "1" * 4000),
        ("seed", "1" * 4000),
        ("max_tokens", "0"),
        ("max_tokens", "-5"),
        ("max_tokens", "100000000"),
        ("max_tokens", "1e3"),
        ("max_tokens", '"5"'),
        ("max_completion_tokens", "100000000"),
        ("n", "0"),
        ("n", "-1"),
        ("n", "17"),
        ("seed", "1.5"),
        ("seed", "18446744073709551616"),
        ("stop", '""'),
        ("stop", "[1]"),
        ("stop", json.dumps(["x"] * 17)),
        ("stop_token_ids", "[272]"),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", '["a"]'),
        ("logit_bias", '{"272": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"a": 1}'),
        ("logit_bias", '{"5": 101}'),
        ("logit_bias", '{"5": NaN}'),
        ("logit_bias", json.dumps({str(key): 1 for key in range(2000)})),
        ("presence_penalty", "2.5"),
        ("frequency_penalty", "NaN"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "1e-300"),
        ("top_logprobs", "21"),
        ("min_tokens", "99"),
        ("priority", '"high"'),
        ("stream", '"yes"'),
        ("return_speculation", '"yes"'),
        ("return_speculation", "1"),
        ("stream_options", "[]"),
        ("response_format", '{"type": "json_object"}'),
        ("tools", '[{"type": "function"}]'),
        ("best_of", "2"),
        ("echo", "true"),
        ("guided_json", "{}"),
        ("no_such_field", "1"),
    ],
)
def test_a_bad_value_is_named(field: str, value: str) -> None:
    if "max" not in field:
        value += ', "max_tokens": 8'
    error = refuse(CHAT, f'{{"messages": {MESSAGES}, "{field}": {value}}}')
    if error["param"] is not None:  # not JSON at all otherwise
        assert error["param"].split(".")[0] == field
    else:
        assert "JSON" in str(error["message"])
        assert "NaN" in value or "Infinity" in value or "1e400" in value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": HELLO, "stop": ["x"] * 17}, "at most 16 items"),
        ({"messages": [HELLO[0]] * 9000}, "at most 8192 items"),
    ],
)
def test_too_many_is_what_the_message_says(body: dict[str, object], words: str) -> None:
    assert words in str(refuse(CHAT, json.dumps(body))["message"])


@pytest.mark.parametrize(
    "messages",
    [
        "[]",
        "null",
        '"hello"',
        '[{"role": "wizard", "content": "x"}]',
        '[{"role": "user"}]',
        '[{"role": "user", "content": null}]',
        '[{"role": "user", "content": 5}]',
        '[{"role": "user", "content": []}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
        '[{"role": "user", "content": "x", "extra": 1}]',
    ],
)
def test_bad_messages(messages: str) -> None:
    error = refuse(CHAT, f'{{"messages": {messages}}}')
    assert str(error["param"]).split(".")[0] == "messages"


@pytest.mark.parametrize(
    "prompt", ['""', "[]", "[[]]", '[""]', "[272]", "[-1]", "[1, 272]", "[[1], [272]]", '[1, "a"]']
)
def test_bad_prompts(prompt: str) -> None:
    error = refuse(TEXT, f'{{"prompt": {prompt}}}')
    assert str(error["param"]).split(".")[0] == "prompt"


@pytest.mark.parametrize("length", [600, 8_000_000])
def test_a_prompt_longer_than_the_context(length: int) -> None:
    prompt = "a" * length
    error = refuse(TEXT, json.dumps({"prompt": prompt}))
    assert error["param"] == "prompt"
    assert "context" in str(error["message"])


def test_max_tokens_beyond_the_context_says_what_is_left() -> None:
    error = refuse(TEXT, json.dumps({"prompt": "x" * 500, "max_tokens": 13}))
    assert "leaves 12 tokens" in str(error["message"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"messages": "\xff"}',
        b"[" * 3000 + b"]" * 3000,
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    ],
)
def test_bodies_that_are_no_request(content: bytes) -> None:
    assert refuse(CHAT, content)["param"] is None


def test_a_body_that_is_too_large() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000_000}]})
    assert refuse(CHAT, body)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": [None] * 100_000}),
        (CompletionRequest, {"prompt": [[None] * 1000] * 128}),
        (CompletionRequest, {"prompt": "a", "stop": [None] * 100_000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [None] * 100_000}),
        (ChatCompletionRequest, {"messages": [{}] * 100_000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * 100_000}]}),
        (ChatCompletionRequest, {"messages": HELLO, "logit_bias": dict.fromkeys(DIGITS, "a")}),
        (ChatCompletionRequest, {"messages": HELLO, **dict.fromkeys(DIGITS)}),
        (DetokenizeRequest, {"tokens": [None] * 100_000}),
    ],
)
def test_a_flood_of_wrong_items_is_a_few_errors(schema: type[Schema], body: object) -> None:
    """One object per wrong item would take gigabytes for a body of a few megabytes."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= 8


def test_long_names_are_not_echoed_whole() -> None:
    name = "k" * 100_000
    assert len(str(refuse(CHAT, json.dumps({"messages": HELLO, name: 1}))["param"])) < 200
    unknown, _ = post(CHAT, json.dumps({"messages": HELLO, "model": name}))
    assert unknown.status_code == 404
    assert len(unknown.text) < 400


def test_a_tiny_temperature_is_greedy() -> None:
    served = Served()

    async def run() -> None:
        async with served.client() as client:
            body = {"messages": HELLO, "temperature": 1e-9, "max_tokens": 1}
            assert (await client.post(CHAT, json=body)).status_code == 200

    asyncio.run(run())
    assert served.engine.submitted[0].sampling.temperature == 0.0


def test_null_means_left_out() -> None:
    names = (
        *("temperature", "top_p", "max_tokens", "n", "stop", "seed", "tools", "logit_bias"),
        "return_speculation",
    )
    bad, _ = post(CHAT, json.dumps({"messages": HELLO, **dict.fromkeys(names)}))
    assert bad.status_code == 200


def test_a_template_s_refusal_is_the_client_s_error() -> None:
    served = Served(tokenizer=tokenizer("{{ raise_exception('no two in a row') }}"))

    async def run() -> httpx.Response:
        async with served.client() as client:
            return await client.post(CHAT, json={"messages": HELLO})

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "no two in a row"
    assert answer.json()["error"]["param"] == "messages"
