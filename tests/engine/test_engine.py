"""The engine around a toy target: what comes out, and that every request ends exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.engine.types import FinishReason, SamplingParams
from tests.engine.toy import EOS, VOCAB, ToySize, drain, request, run, text, toy_engine, toy_logits

GREEDY = SamplingParams(seed=0, max_tokens=12, temperature=0.0)


def greedy_by_hand(prompt: list[int], max_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(int(toy_logits(known).argmax()))
        if known[-1] == EOS:
            break
    return known[len(prompt) :]


def test_greedy_text_is_the_targets_argmax() -> None:
    deltas = run(toy_engine(), [request("a", [5, 6, 7], GREEDY)])["a"]
    assert text(deltas) == greedy_by_hand([5, 6, 7], 12)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), min_size=2, max_size=8),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    num_pages=st.sampled_from([14, 64]),
)
def test_neighbours_chunks_hits_and_preemption_change_no_token(
    prompts: list[list[int]], temperature: float, num_pages: int
) -> None:
    requests = [
        request(
            f"r{index}",
            prompt,
            SamplingParams(
                seed=index, max_tokens=20, temperature=temperature, top_p=0.9, ignore_eos=True
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    together = run(toy_engine(ToySize(num_pages=num_pages)), requests)
    for item in requests:
        alone = run(toy_engine(), [item])[item.request_id]
        assert text(together[item.request_id]) == text(alone)
        assert together[item.request_id][-1].finish_reason is FinishReason.LENGTH
        assert len(text(alone)) == 20


@pytest.mark.parametrize(
    ("sampling", "reason", "stop_token_id", "length"),
    [
        (SamplingParams(seed=0, max_tokens=3, temperature=0, ignore_eos=True), "length", None, 3),
        (SamplingParams(seed=0, max_tokens=50, logit_bias={EOS: 99}), "stop", None, 1),
        (
            SamplingParams(seed=0, max_tokens=9, logit_bias={4: 99}, stop_token_ids=frozenset({4})),
            "stop",
            4,
            1,
        ),
        (SamplingParams(seed=0, max_tokens=99, ignore_eos=True), "length", None, 20),
    ],
)
def test_finish_reasons(
    sampling: SamplingParams, reason: str, stop_token_id: int | None, length: int
) -> None:
    deltas = run(toy_engine(ToySize(max_model_len=30)), [request("a", [1] * 10, sampling)])["a"]
    assert deltas[-1].finish_reason == reason
    assert deltas[-1].stop_token_id == stop_token_id
    assert len(text(deltas)) == length


def test_min_tokens_holds_back_every_ending() -> None:
    sampling = SamplingParams(
        seed=0,
        max_tokens=20,
        min_tokens=7,
        temperature=0,
        logit_bias={EOS: 99, 4: 98},
        stop_token_ids=frozenset({4}),
    )
    tokens = text(run(toy_engine(), [request("a", [1], sampling)])["a"])
    assert len(tokens) == 8
    assert not {EOS, 4} & set(tokens[:7])


def test_a_ban_holds_even_against_certainty() -> None:
    likely = int(toy_logits([1]).argmax())
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0, logit_bias={likely: -100})
    assert text(run(toy_engine(), [request("a", [1], sampling)])["a"]) != [likely]


def test_logprobs_are_the_targets_own() -> None:
    sampling = SamplingParams(
        seed=3, max_tokens=4, temperature=0.5, num_logprobs=3, logit_bias={9: 50}, ignore_eos=True
    )
    deltas = run(toy_engine(), [request("a", [1, 2], sampling)])["a"]
    known = [1, 2]
    for delta in deltas:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        expected = toy_logits(known).log_softmax(-1)
        assert entry.token_id == delta.token_ids[0] == 9
        assert entry.logprob == pytest.approx(float(expected[9]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
        known += delta.token_ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(narrow: dict[str, float]) -> None:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 12, **narrow})  # type: ignore[arg-type]
    tokens = text(run(toy_engine(), [request("a", [5, 6, 7], sampling)])["a"])
    assert tokens == greedy_by_hand([5, 6, 7], 12)


def penalized_by_hand(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Greedy tokens with the penalties written out, token by token of the vocabulary."""
    known = list(prompt)
    for _ in range(sampling.max_tokens):
        scores = toy_logits(known).tolist()
        output = known[len(prompt) :]
        for token in range(VOCAB):
            if token in known:
                factor = sampling.repetition_penalty
                scores[token] *= 1 / factor if scores[token] > 0 else factor
            scores[token] -= sampling.frequency_penalty * output.count(token)
            scores[token] -= sampling.presence_penalty * (token in output)
        known.append(scores.index(max(scores)))
    return known[len(prompt) :]


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.8},
        {"presence_penalty": -0.5, "frequency_penalty": 1.1, "repetition_penalty": 0.7},
    ],
)
def test_penalties_by_hand(penalties: dict[str, float]) -> None:
    """The prompt is half the vocabulary, so that leaving it out of repetition would show."""
    prompt = list(range(1, VOCAB // 2))
    given = {"seed": 0, "max_tokens": 25, "temperature": 0.0, "ignore_eos": True, **penalties}
    sampling = SamplingParams(**given)  # type: ignore[arg-type]
    tokens = text(run(toy_engine(), [request("a", prompt, sampling)])["a"])
    assert tokens == penalized_by_hand(prompt, sampling)


def test_abort_ends_a_request_wherever_it_is() -> None:
    engine = toy_engine(ToySize(seqs=1))
    engine.add(request("running", [1] * 5, GREEDY))
    engine.add(request("waiting", [2] * 5, GREEDY))
    engine.step()
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("never seen")
    deltas = drain(engine)
    for name in ("running", "waiting"):
        assert [d.finish_reason for d in deltas[name]] == [FinishReason.ABORT]
    assert engine.step().stats.num_pages_used == 0


def test_what_cannot_be_served_ends_with_an_error_and_nothing_else_suffers() -> None:
    requests = [
        request("empty", [], GREEDY),
        request("long", [1] * 100, GREEDY),
        request("fine", [5, 6, 7], GREEDY),
    ]
    deltas = run(toy_engine(), requests)
    for name, words in (("empty", "empty"), ("long", "100 tokens")):
        assert [d.finish_reason for d in deltas[name]] == [FinishReason.ERROR]
        assert words in str(deltas[name][0].error)
    assert text(deltas["fine"]) == greedy_by_hand([5, 6, 7], 12)


def test_first_delta_reports_cache_hits_and_queue_time() -> None:
    engine = toy_engine()
    run(engine, [request("a", [3] * 9, GREEDY)])
    deltas = run(engine, [request("b", [3] * 9, GREEDY)])["b"]
    assert deltas[0].num_cached_tokens == 8
    assert deltas[0].queue_s is not None
    assert deltas[1].num_cached_tokens is None
