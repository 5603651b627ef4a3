"""Prometheus metrics. Names as vLLM has them, behind our prefix, where it has one."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Info,
    disable_created_metrics,
    generate_latest,
)

from adaflash import __version__
from adaflash.engine.messages import EngineFacts, LearningReport, StepStats
from adaflash.server.learning_metrics import LearningMetrics
from adaflash.server.series import Series
from adaflash.server.speculation_metrics import SpeculationMetrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double every counter and no dashboard reads them

STEP_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.010, 0.012, 0.015, 0.020, 0.025),
    *(0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.200, 0.300, 0.500, 1.0, 2.0, 5.0),
)
PER_TOKEN_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050),
    *(0.060, 0.080, 0.100, 0.150, 0.200, 0.300, 0.400, 0.500, 0.750, 1.0, 2.5, 5.0, 10.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.010, 0.020, 0.040, 0.060, 0.080, 0.100, 0.250, 0.500, 0.750, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
WHOLE_S = (
    *(0.050, 0.100, 0.200, 0.300, 0.500, 0.800, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
QUEUE_S = (0.001, 0.005, 0.010, 0.050, 0.100, 0.300, 0.500, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 240.0)
TOKENS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
STEP_TOKENS = tuple(float(2**power) for power in range(14))


class Metrics:
    """All series of one server, in a registry of their own. Labels: model_name."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._series = Series(self.registry, model_name)
        self._info = Info("adaflash_build", "Version", registry=self.registry)
        self._info.info({"version": __version__})
        self._cache_info = Info("adaflash_cache_config", "KV cache", registry=self.registry)
        self._was_up = False
        self._define_engine()
        self._define_requests()
        self.speculation = SpeculationMetrics(self.registry, self._series)
        self._learning = LearningMetrics(self._series)

    def _define_engine(self) -> None:
        self.engine_up = self._series.gauge("engine_up", "1 while the engine process serves.")
        self.engine_restarts = self._series.counter(
            "engine_restarts", "Restarts of the engine process."
        )
        self.running = self._series.gauge("num_requests_running", "Requests that hold pages.")
        self.waiting = self._series.gauge("num_requests_waiting", "Requests that wait for a place.")
        self.kv_usage = self._series.gauge(
            "kv_cache_usage_perc", "Share of K/V pages in use, 0 to 1."
        )
        self.prefix_queries = self._series.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = self._series.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self.preemptions = self._series.counter(
            "num_preemptions", "Requests pushed out for lack of pages."
        )
        self.step_duration = self._series.histogram(
            "step_duration_seconds", "One engine step.", STEP_S
        )
        self.step_tokens = self._series.histogram(
            "iteration_tokens_total", "Tokens computed in one step.", STEP_TOKENS
        )

    def _define_requests(self) -> None:
        self.prompt_tokens = self._series.counter(
            "prompt_tokens", "Prompt tokens of started requests."
        )
        self.prompt_tokens_cached = self._series.counter(
            "prompt_tokens_cached", "Of them, those taken from the prefix cache."
        )
        self.generation_tokens = self._series.counter("generation_tokens", "Tokens generated.")
        self._success = self._series.counter_by(
            "request_success",
            "Ended requests, by how they ended.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self._rejections = self._series.counter_by(
            "admission_rejections", "Requests that were not taken in, by reason.", "reason"
        )
        self._http = Counter(
            "adaflash_http_requests",
            "HTTP requests.",
            ["endpoint", "method", "status_code"],
            registry=self.registry,
        )
        self.first_token = self._series.histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S
        )
        self.inter_token = self._series.histogram(
            "inter_token_latency_seconds",
            "Gap between tokens; those of one delta share its gap.",
            PER_TOKEN_S,
        )
        self.per_token = self._series.histogram(
            "request_time_per_output_token_seconds",
            "A request's mean after the first.",
            PER_TOKEN_S,
        )
        self.whole = self._series.histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", WHOLE_S
        )
        self.queue_time = self._series.histogram(
            "request_queue_time_seconds", "From arrival to the first step.", QUEUE_S
        )
        self.request_prompt = self._series.histogram(
            "request_prompt_tokens", "Prompt length of a request.", TOKENS
        )
        self.request_generation = self._series.histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKENS
        )

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def on_engine_up(self, facts: EngineFacts) -> None:
        """The engine is ready; the second time and later it has been restarted."""
        self._cache_info.info(
            {
                "num_pages": str(facts.num_pages),
                "page_size": str(facts.page_size),
                "capacity_tokens": str(facts.kv_capacity_tokens),
                "dtype": facts.dtype,
            }
        )
        if self._was_up:
            self.engine_restarts.inc()
        self._was_up = True
        self.engine_up.set(1)
        self.speculation.on_engine_up(facts.speculation)

    def on_engine_down(self) -> None:
        for gauge in (self.engine_up, self.running, self.waiting, self.kv_usage):
            gauge.set(0)
        self.speculation.on_engine_down()
        self._learning.on_engine_down()

    def on_learning(self, report: LearningReport) -> None:
        self._learning.on_learning(report)

    def on_step(self, stats: StepStats) -> None:
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.num_pages_used / stats.num_pages)
        self.prefix_queries.inc(stats.num_prefix_queries)
        self.prefix_hits.inc(stats.num_prefix_hits)
        self.preemptions.inc(stats.num_preempted)
        tokens = stats.num_prefill_tokens + stats.num_decode_rows + stats.num_draft_tokens
        if tokens > 0:
            self.step_duration.observe(stats.step_s)
            self.step_tokens.observe(tokens)
            self.speculation.on_step(stats)

    def count_end(self, reason: str) -> None:
        self._success.of(reason).inc()

    def count_rejection(self, reason: str) -> None:
        self._rejections.of(reason).inc()

    def count_http(self, endpoint: str, method: str, status: int) -> None:
        self._http.labels(endpoint, method, str(status)).inc()
