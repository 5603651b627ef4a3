"""What is accepted at the edges of every range must not hurt the engine."""

import pytest

from tests.e2e.running_server import RunningServer

EXTREMES: list[dict[str, object]] = [
    {"top_k": 2**31 - 1},
    {"top_k": 1, "top_p": 1e-12, "min_p": 1},
    {"temperature": 2, "top_p": 1e-300, "seed": 2**64 - 1},
    {"temperature": 1e-9, "seed": -(2**63)},
    {"temperature": 1e-4},
    {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 2},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 0.01, "temperature": 0},
    {"logit_bias": {str(token): -100 for token in range(272)}},
    {"logit_bias": {str(token): 100 for token in range(272)}},
    {"stop_token_ids": list(range(64)), "min_tokens": 8},
    {"stop": ["x" * 1024] * 16},
    {"n": 16, "logprobs": True, "top_logprobs": 20},
    {"priority": -(2**31)},
    {"min_tokens": 8, "ignore_eos": True},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=lambda fields: "-".join(fields))
@pytest.mark.parametrize("stream", [False, True])
def test_the_edges_of_every_range_are_served(
    server: RunningServer, fields: dict[str, object], stream: bool
) -> None:
    engine = server.engine.pid
    answer = server.chat(max_tokens=8, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    assert server.engine.pid == engine
    assert server.chat(max_tokens=2).status_code == 200
