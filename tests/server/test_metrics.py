"""The series that dashboards are built on: their names, and what moves them."""

import pytest

from adaflash.engine.messages import EngineFacts, StepStats
from adaflash.server.fake_engine import FACTS
from adaflash.server.metrics import PER_TOKEN_S, STEP_S, Metrics

STATS = StepStats(
    step_s=0.0015,
    num_prefill_tokens=20,
    num_decode_rows=3,
    num_running=4,
    num_waiting=2,
    num_pages_used=16,
    num_pages=64,
    num_prefix_queries=40,
    num_prefix_hits=32,
    num_preempted=1,
)
# What the README and the dashboards name; histograms by their count.
PROMISED = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "step_duration_seconds_count",
    "iteration_tokens_total_count",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "engine_up",
    "engine_restarts_total",
]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"adaflash_{name}", {"model_name": "m", **labels})
    assert found is not None, name
    return found


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_series_exists_from_the_start(name: str) -> None:
    assert value(Metrics("m"), name) == 0


def test_a_step_moves_its_series() -> None:
    metrics = Metrics("m")
    for _ in range(2):
        metrics.on_step(STATS)
    gauges = {"num_requests_running": 4, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25}
    counters = {
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 64,
        "num_preemptions_total": 2,
        "step_duration_seconds_count": 2,
        "iteration_tokens_total_sum": 46,
    }
    for name, expected in (gauges | counters).items():
        assert value(metrics, name) == expected
    assert value(metrics, "step_duration_seconds_bucket", le="0.001") == 0
    assert value(metrics, "step_duration_seconds_bucket", le="0.002") == 2


def test_buckets_resolve_a_millisecond() -> None:
    for buckets in (STEP_S, PER_TOKEN_S):
        assert {0.001, 0.002} <= set(buckets)
        assert list(buckets) == sorted(set(buckets))


def test_up_down_and_restarts() -> None:
    metrics, facts = Metrics("m"), FACTS
    assert isinstance(facts, EngineFacts)
    metrics.on_engine_up(facts)
    assert (value(metrics, "engine_up"), value(metrics, "engine_restarts_total")) == (1, 0)
    metrics.on_step(STATS)
    metrics.on_engine_down()
    assert value(metrics, "engine_up") == value(metrics, "num_requests_running") == 0
    metrics.on_engine_up(facts)
    assert (value(metrics, "engine_up"), value(metrics, "engine_restarts_total")) == (1, 1)
