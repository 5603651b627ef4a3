"""Drafts from request to answer: what is reported is what usage and metrics count."""

import asyncio
import json
from typing import NotRequired, TypedDict

import httpx
import pytest

from adaflash.server.fake_engine import FakeEngineClient
from tests.server.app_client import HELLO, Served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "abcdefgh"})]


class Report(TypedDict):
    verify_lengths: list[int]
    accepted: list[int]
    mean_accepted_length: float | None


class Choice(TypedDict):
    """A choice of a chunk, as far as it matters here."""

    index: int
    text: str
    finish_reason: str | None
    adaflash: NotRequired[Report]


def post(served: Served, path: str, body: dict[str, object]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with served.client() as client:
            return await client.post(path, json=body)

    answer = asyncio.run(run())
    assert answer.status_code == 200, answer.text
    return answer


def chunks(answer: httpx.Response) -> list[Choice]:
    """The choices of a stream's chunks."""
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [choice for event in events for choice in event["choices"]]


def drafting(drafts: int, tokens: int) -> Served:
    return Served(engine=FakeEngineClient(drafts_per_delta=drafts, tokens_per_delta=tokens))


def counted(served: Served) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: served.metric(f"adaflash_spec_decode_num_{name}_total") for name in names}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_report_is_given_if_asked_for(path: str, body: dict[str, object]) -> None:
    served = drafting(drafts=4, tokens=3)
    answer = post(served, path, body | {"max_tokens": 9, "return_speculation": True}).json()
    (choice,) = answer["choices"]
    # One token from the prompt's step, then 3 + 3 + 2: the last step has room for one draft only.
    assert choice["adaflash"] == {
        "verify_lengths": [4, 4, 1],
        "accepted": [2, 2, 1],
        "mean_accepted_length": pytest.approx(8 / 3),
    }
    assert answer["usage"]["completion_tokens"] == 1 + 8
    assert counted(served) == {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 5}
    for position, (drafted, accepted) in enumerate([(3, 3), (2, 2), (2, None), (2, None)]):
        name = "adaflash_spec_decode_num_{}_tokens_per_pos_total"
        assert served.metric(name.format("drafted"), position=str(position)) == drafted
        if accepted is not None:
            assert served.metric(name.format("accepted"), position=str(position)) == accepted


@pytest.mark.parametrize("asked", [None, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_there_is_no_report_otherwise(
    path: str, body: dict[str, object], stream: bool, asked: bool | None
) -> None:
    body = body | {"max_tokens": 9, "stream": stream, "return_speculation": asked}
    assert "adaflash" not in post(drafting(drafts=4, tokens=3), path, body).text


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_reports_with_the_last_chunk_of_each_choice(
    path: str, body: dict[str, object]
) -> None:
    body = body | {"max_tokens": 9, "n": 2, "return_speculation": True}
    whole = post(drafting(drafts=4, tokens=3), path, body).json()["choices"]
    streamed = chunks(post(drafting(drafts=4, tokens=3), path, body | {"stream": True}))
    reports = {}
    for choice in streamed:
        assert ("adaflash" in choice) == (choice["finish_reason"] is not None)
        if "adaflash" in choice:
            reports[choice["index"]] = choice["adaflash"]
    assert reports == {choice["index"]: choice["adaflash"] for choice in whole}
    assert len(reports) == 2


def test_plain_decoding_reports_zeros() -> None:
    served = drafting(drafts=0, tokens=1)
    body = {"prompt": "abc", "max_tokens": 3, "return_speculation": True}
    (choice,) = post(served, TEXT, body).json()["choices"]
    assert choice["adaflash"] == {
        "verify_lengths": [0, 0],
        "accepted": [0, 0],
        "mean_accepted_length": 1.0,
    }
    assert counted(served) == {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    assert served.metric("adaflash_spec_decode_verify_length_bucket", le="0.0") == 2


def test_a_choice_without_a_decode_step_has_no_mean() -> None:
    served = drafting(drafts=4, tokens=3)
    body = {"prompt": "abc", "max_tokens": 1, "return_speculation": True}
    (choice,) = post(served, TEXT, body).json()["choices"]
    assert choice["adaflash"] == {
        "verify_lengths": [],
        "accepted": [],
        "mean_accepted_length": None,
    }
    assert served.metric("adaflash_spec_decode_verify_length_count") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept", "accepted"),
    [
        ("bc", 3, [2]),  # within the first run of accepted drafts
        ("cd", 4, [3]),  # with its last draft
        ("de", 5, [3]),  # with the token after it, which is no draft
        ("ef", 6, [3, 1]),  # with the first draft of the second run
        ("fg", 7, [3, 2]),
    ],
)
def test_what_a_stop_string_cuts_away_was_verified_but_is_not_accepted(
    stop: str, kept: int, accepted: list[int], stream: bool
) -> None:
    """The tokens come as a, b c d e, f g h a, and the last of each is no draft."""
    served = drafting(drafts=5, tokens=4)
    body = {"prompt": "abcdefgh", "stop": stop, "max_tokens": 30, "logprobs": 1}
    body |= {"stream": stream, "return_speculation": True}
    answer = post(served, TEXT, body)
    choices = chunks(answer) if stream else answer.json()["choices"]
    steps = len(accepted)
    assert "".join(choice["text"] for choice in choices) == "abcdefgh"[: kept - 2]
    assert choices[-1]["adaflash"] == {
        "verify_lengths": [5] * steps,
        "accepted": accepted,
        "mean_accepted_length": sum(accepted) / steps + 1,
    }
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == kept
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == kept
    assert served.metric("adaflash_generation_tokens_total") == kept
    assert counted(served) == {
        "drafts": steps,
        "draft_tokens": 5 * steps,
        "accepted_tokens": sum(accepted),
    }
    assert len(served.engine.aborted) == 1


def test_the_document_describes_the_report() -> None:
    schemas = Served().app().openapi()["components"]["schemas"]
    for name in ("ChatChoice", "CompletionChoice"):
        assert "adaflash" in schemas[name]["properties"]
        assert "adaflash" not in schemas[name]["required"]
    described = schemas["Speculation"]["properties"]
    assert list(described) == ["verify_lengths", "accepted", "mean_accepted_length"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        assert "return_speculation" in schemas[name]["properties"]
