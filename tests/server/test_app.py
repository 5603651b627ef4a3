"""Life around the answers: keys, overload, shutdown, failures, ids, metrics."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.types import Message

from adaflash.engine.types import FinishReason, SamplingParams, TokenLogprobs
from adaflash.server.answers import WholeChoice
from adaflash.server.context import AppOptions
from adaflash.server.fake_engine import FakeEngineClient
from adaflash.server.generate import ChoiceDelta
from adaflash.server.logs import ACCESS, FIELDS, JsonFormatter
from adaflash.server.routes.completions import CompletionFormat
from tests.server.app_client import HELLO, Served, tokenizer

CHAT = "/v1/chat/completions"
Steps = Callable[[httpx.AsyncClient], Awaitable[None]]


def run(served: Served, steps: Steps) -> None:
    async def inside() -> None:
        async with served.client() as client:
            await steps(client)

    asyncio.run(inside())


def events(answer: httpx.Response) -> list[dict[str, object]]:
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_keys_guard_everything_but_health_and_metrics() -> None:
    served = Served(options=AppOptions(("tiny",), api_keys=("first", "second")))

    async def steps(client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            for path in (CHAT, "/tokenize", "/detokenize", "/v1/completions"):
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        for key in ("first", "second"):
            good = await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})
            assert good.status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200

    run(served, steps)


def test_a_full_queue_is_429_with_a_time() -> None:
    served = Served(engine=FakeEngineClient(max_in_flight=2))

    async def steps(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            body = {"messages": HELLO, "n": 3, "stream": stream}
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 429
            assert answer.headers["Retry-After"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"

    run(served, steps)
    assert served.metric("adaflash_admission_rejections_total", reason="queue_full") == 2


def test_draining_and_down_are_503() -> None:
    served = Served()

    async def steps(client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 1}
        served.engine.is_advancing = False
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        served.engine.is_alive = False
        assert (await client.get("/health")).status_code == 503
        down = await client.post(CHAT, json=body)
        assert (down.status_code, down.json()["error"]["code"]) == (503, "engine_down")
        served.engine.is_alive = served.engine.is_advancing = True
        served.lifecycle.draining = True
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "Retry-After" in refused.headers

    run(served, steps)
    for reason in ("engine_down", "shutting_down"):
        assert served.metric("adaflash_admission_rejections_total", reason=reason) == 1


def test_a_death_in_mid_stream_is_an_event() -> None:
    served = Served(engine=FakeEngineClient(dies_after=3))

    async def steps(client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json={"messages": HELLO, "stream": True})
        assert answer.status_code == 200
        *_, last = events(answer)
        error = last["error"]
        assert isinstance(error, dict)
        assert error["code"] == "engine_down"
        whole = await client.post(CHAT, json={"messages": HELLO})
        assert whole.status_code == 503

    run(served, steps)
    assert served.metric("adaflash_request_success_total", finished_reason="error") == 2


def test_the_openai_client_raises_its_own_kinds_of_error() -> None:
    served = Served(
        options=AppOptions(("tiny",), api_keys=("key",)), engine=FakeEngineClient(max_in_flight=1)
    )

    async def chat(http: httpx.AsyncClient, key: str = "key", n: int = 1) -> None:
        client = AsyncOpenAI(
            base_url="http://tiny/v1",
            api_key=key,
            max_retries=0,
            http_client=http,  # type: ignore[arg-type]  # typed for httpx's twin; takes httpx too
        )
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], n=n
        )

    async def steps(http: httpx.AsyncClient) -> None:
        with pytest.raises(openai.AuthenticationError):
            await chat(http, key="wrong")
        with pytest.raises(openai.RateLimitError):
            await chat(http, n=2)
        with pytest.raises(openai.BadRequestError):
            await chat(http, n=0)
        served.engine.is_alive = False
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(http)
        assert caught.value.status_code == 503

    run(served, steps)


def test_unknown_places_answer_in_the_same_shape() -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        for answer, status in (
            (await client.get("/nowhere"), 404),
            (await client.get(CHAT), 405),
            (await client.post(CHAT, json={"model": "other", "messages": HELLO}), 404),
            (await client.get("/v1/models/a/b"), 404),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(Served(), steps)


def test_an_unexpected_error_is_500_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()

    def fail(*_: object) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr(served.engine, "submit", fail)

    async def steps(client: httpx.AsyncClient) -> None:
        headers = {"X-Request-Id": "some-id"}
        answer = await client.post(CHAT, json={"messages": HELLO}, headers=headers)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"
        assert answer.headers["X-Request-Id"] == "some-id"

    run(served, steps)
    labels = {"endpoint": CHAT, "method": "POST", "status_code": "500"}
    count = served.metrics.registry.get_sample_value("adaflash_http_requests_total", labels)
    assert count == 1


@pytest.mark.parametrize(("given", "kept"), [("my-id.1", True), ("a b", False), ("x" * 200, False)])
def test_request_ids_are_echoed_or_made(given: str, kept: bool) -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        answer = await client.get("/health", headers={"X-Request-Id": given})
        assert (answer.headers["X-Request-Id"] == given) == kept
        chat = await client.post(
            CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"X-Request-Id": given}
        )
        assert chat.json()["id"] == f"chatcmpl-{chat.headers['X-Request-Id']}"

    run(Served(), steps)


def test_the_log_line_has_the_id_and_the_tokens(caplog: pytest.LogCaptureFixture) -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 3}
        await client.post(CHAT, json=body, headers={"X-Request-Id": "mine"})

    with caplog.at_level("INFO", logger=ACCESS):
        run(Served(), steps)
    (record,) = (r for r in caplog.records if r.name == ACCESS)
    assert "id=mine" in record.getMessage()
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["status"], line["completion_tokens"]) == ("mine", 200, 3)
    assert (line["level"], line["path"]) == ("info", CHAT)


def test_a_client_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        await client.get("/x%0aERROR%20forged%1b[31m")

    with caplog.at_level("INFO", logger=ACCESS):
        run(Served(), steps)
    (record,) = (r for r in caplog.records if r.name == ACCESS)
    assert record.getMessage().isprintable()


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaflash.server.bodies.IDLE_S", 0.05)
    sent: list[Message] = []
    parts = [{"type": "http.request", "body": b'{"mess', "more_body": True}]

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(60)
        return parts.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(Served().app()(scope, receive, send))
    assert sent[0]["status"] == 400
    assert b"did not come" in sent[1]["body"]


def test_completion_logprobs_of_half_characters() -> None:
    """Their names tell them apart, and offsets count whole characters of the text."""
    tokens = [
        TokenLogprobs(id_, -1.0, [(id_, -1.0)])
        for id_ in tokenizer().encode("aé🙂b", add_special_tokens=False)
    ]
    choice = WholeChoice(0, "aé🙂b", tokens, ChoiceDelta(0, "", [], FinishReason.LENGTH))
    logprobs = CompletionFormat(tokenizer()).whole(choice)["logprobs"]
    assert isinstance(logprobs, dict)
    assert logprobs["tokens"][:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_one_id_used_twice_at_once_is_two_requests() -> None:
    served = Served(engine=FakeEngineClient(delta_s=0.001))

    async def steps(client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 5}
        headers = {"X-Request-Id": "same"}
        posts = [client.post(CHAT, json=body, headers=headers) for _ in range(2)]
        answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200, 200]

    run(served, steps)
    assert len({request.request_id for request in served.engine.submitted}) == 2


def test_metrics_count_what_happened() -> None:
    served = Served()

    async def steps(client: httpx.AsyncClient) -> None:
        await client.post(CHAT, json={"messages": HELLO, "max_tokens": 5, "n": 2})
        body = {"messages": HELLO, "max_tokens": 5, "stop": "u"}  # the fake echoes "user..."
        answer = await client.post(CHAT, json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await client.get("/no/such/path")
        text = (await client.get("/metrics")).text
        assert 'adaflash_http_requests_total{endpoint="unmatched"' in text

    run(served, steps)
    ends = {
        reason: served.metric("adaflash_request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 2, "abort": 0, "error": 0}
    # The stop string ends at the second token: the first one is special.
    assert served.metric("adaflash_generation_tokens_total") == 5 + 5 + 2
    assert served.metric("adaflash_time_to_first_token_seconds_count") == 3
    prompt = len(served.engine.submitted[0].prompt_ids)
    assert served.metric("adaflash_prompt_tokens_total") == 2 * prompt  # n = 2 counts it once


def test_every_sampling_field_arrives() -> None:
    served = Served()
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 11,
        "min_tokens": 3,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.25,
        "repetition_penalty": 1.125,
        "logit_bias": {"8": -2.5},
    }
    expected = SamplingParams(
        **{
            **fields,
            "stop_token_ids": frozenset({5, 6}),
            "logit_bias": {8: -2.5},
            "num_logprobs": 4,
        }  # type: ignore[arg-type]
    )

    async def steps(client: httpx.AsyncClient) -> None:
        chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 4, "priority": 3}
        assert (await client.post(CHAT, json=chat | fields)).status_code == 200
        text = {"prompt": "Hello", "logprobs": 4, "priority": 3}
        assert (await client.post("/v1/completions", json=text | fields)).status_code == 200

    run(served, steps)
    assert [request.sampling for request in served.engine.submitted] == [expected, expected]
    assert [request.priority for request in served.engine.submitted] == [3, 3]


def test_tokenize_and_back() -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        text = "héllo 🙂 <|im_end|>"
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()
        assert tokens["count"] == len(tokens["tokens"]) == len("héllo 🙂 ".encode()) + 1
        back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json()["prompt"] == text
        chat = await client.post("/tokenize", json={"messages": HELLO})
        assert chat.json()["count"] > 6
        assert (await client.post("/tokenize", json={})).status_code == 400
        out_of_range = await client.post("/detokenize", json={"tokens": [10**6]})
        assert out_of_range.status_code == 400

    run(Served(), steps)


def test_an_idle_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaflash.server.sse.KEEP_ALIVE_S", 0.01)
    served = Served(engine=FakeEngineClient(delta_s=0.05))

    async def steps(client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 2, "stream": True}
        answer = await client.post(CHAT, json=body)
        assert ": keep-alive\n\n" in answer.text
        assert len(events(answer)) == 2  # the fake's first token, a special one, has no text

    run(served, steps)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_line_has_the_token_counts(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        await client.post(CHAT, json={"messages": HELLO, "max_tokens": 7, "stream": stream})

    with caplog.at_level(logging.INFO, logger=ACCESS):
        run(Served(), steps)
    (record,) = (record for record in caplog.records if record.name == ACCESS)
    assert "completion_tokens=7" in record.getMessage()
    assert getattr(record, FIELDS)["completion_tokens"] == 7


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
def test_what_follows_a_stop_string_in_its_delta_does_not_count(tokens_per_delta: int) -> None:
    served = Served(engine=FakeEngineClient(tokens_per_delta=tokens_per_delta))

    async def steps(client: httpx.AsyncClient) -> None:
        body = {"prompt": "abcdefgh", "stop": "ef", "max_tokens": 20, "logprobs": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["text"] == "abcd"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ef")
        assert choice["logprobs"]["tokens"] == list("abcdef")
        assert answer["usage"]["completion_tokens"] == 6

    run(served, steps)
    assert len(served.engine.aborted) == 1
    assert served.metric("adaflash_generation_tokens_total") == 6


def test_events_hold_no_character_that_ends_a_line() -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        body = {"prompt": "\u2028\x85é", "max_tokens": 7, "stream": True}
        answer = await client.post("/v1/completions", json=body)
        lines = [line for line in answer.text.splitlines() if line]
        assert all(line.startswith("data: ") for line in lines)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "\u2028\x85é"

    run(Served(), steps)
