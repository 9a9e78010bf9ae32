# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM 0.32's metrics, by name, type and label.

What happens for every token is counted in plain attributes and turned into metrics when they are asked for: a
``Histogram.observe`` of the client library a token would cost more than all else that the engine does for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

# Bucket bounds of vLLM 0.32, in seconds or tokens.
REQUEST_LATENCY = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    + (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
TIME_TO_FIRST_TOKEN = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
    + (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
INTER_TOKEN_LATENCY = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
    + (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip
ITERATION_TOKENS = tuple(float(count) for count in (1, *(2**power for power in range(3, 15))))
REQUEST_PARAMS_N = (1.0, 2.0, 5.0, 10.0, 20.0)
REQUEST_NUM_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

# Bucket bounds of prometheus-fastapi-instrumentator, which serves vLLM's HTTP metrics.
HTTP_FINE = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5)
    + (3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0)
)  # fmt: skip
HTTP_COARSE = (0.1, 0.5, 1.0)

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
WAITING_REASONS = ("capacity", "deferred")
ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


def request_token_bounds(max_model_len: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, 50 … up to the longest context."""
    bounds: list[float] = []
    decade = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * decade > max_model_len:
                return tuple(bounds)
            bounds.append(float(mantissa * decade))
        decade *= 10


class Distribution:
    """A histogram in plain numbers."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was seen that many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus wants them: upper bound and count up to it."""
        buckets: list[tuple[str, float]] = []
        count = 0
        for bound, inside in zip((*map(str, self.bounds), "+Inf"), self.counts):
            count += inside
            buckets.append((bound, float(count)))
        return buckets


class EngineMetrics(Collector):
    """State and history of the engine, as ``/metrics`` shows them.

    Args:
        model_name: value of the label ``model_name``.
        max_model_len: bound of the token histograms.
        cache_config: labels of ``vllm:cache_config_info``.
        max_loras: adapters that may run at once, or None if adapters are off.
    """

    def __init__(
        self, model_name: str, max_model_len: int, cache_config: dict[str, str], max_loras: int | None
    ) -> None:
        self._model_name = model_name
        self._cache_config = cache_config
        self._max_loras = max_loras
        self._created = time.time()
        tokens = request_token_bounds(max_model_len)
        self.running = 0
        self.waiting = dict.fromkeys(WAITING_REASONS, 0)
        self.running_adapters: Iterable[str] = ()
        self.waiting_adapters: Iterable[str] = ()
        self.cache_usage = 0.0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = dict.fromkeys(ADMISSION_REASONS, 0)
        self.request_prompt_tokens = Distribution(tokens)
        self.request_generation_tokens = Distribution(tokens)
        self.request_max_num_generation_tokens = Distribution(tokens)
        self.request_params_max_tokens = Distribution(tokens)
        self.request_prefill_kv_computed_tokens = Distribution(tokens)
        self.request_params_n = Distribution(REQUEST_PARAMS_N)
        self.request_num_preemptions = Distribution(REQUEST_NUM_PREEMPTIONS)
        self.iteration_tokens = Distribution(ITERATION_TOKENS)
        self.time_to_first_token = Distribution(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = Distribution(INTER_TOKEN_LATENCY)
        self.request_time_per_output_token = Distribution(INTER_TOKEN_LATENCY)
        self.e2e_request_latency = Distribution(REQUEST_LATENCY)
        self.request_queue_time = Distribution(REQUEST_LATENCY)
        self.request_inference_time = Distribution(REQUEST_LATENCY)
        self.request_prefill_time = Distribution(REQUEST_LATENCY)
        self.request_decode_time = Distribution(REQUEST_LATENCY)

    def state(self) -> tuple[object, ...]:
        """All that the metrics are made of, to be compared with what it was."""
        return tuple(_frozen(value) for value in vars(self).values())

    def collect(self) -> Iterator[Metric]:
        """Give all metrics of the engine."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauge(
        self, name: str, text: str, values: Mapping[str, float] | float, label: str | None = None
    ) -> GaugeMetricFamily:
        labels = ["model_name", "engine", *([label] if label else [])]
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
        for value, number in (values if isinstance(values, Mapping) else {"": values}).items():
            family.add_metric([self._model_name, "0", *([value] if label else [])], number)
        return family

    def _counter(
        self, name: str, text: str, values: Mapping[str, float] | float, label: str | None = None, engine: bool = True
    ) -> CounterMetricFamily:
        labels = ["model_name", *(["engine"] if engine else []), *([label] if label else [])]
        family = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for value, number in (values if isinstance(values, Mapping) else {"": values}).items():
            label_values = [self._model_name, *(["0"] if engine else []), *([value] if label else [])]
            family.add_metric(label_values, number, created=self._created)
        return family

    def _gauges(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", self.running)
        yield self._gauge(
            "num_requests_waiting", "Number of requests waiting to be processed.", sum(self.waiting.values())
        )
        yield self._gauge(
            "num_requests_waiting_by_reason", "Number of waiting requests by reason.", self.waiting, "reason"
        )
        yield self._gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 1 means engine is awake.",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "sleep_state",
        )
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", self.cache_usage)
        info = {**self._cache_config, "engine": "0"}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        family.add_metric(list(info.values()), 1)
        yield family
        if self._max_loras is not None:
            lora = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Running stats on lora requests.",
                labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            )
            waiting, running = (",".join(sorted(names)) for names in (self.waiting_adapters, self.running_adapters))
            lora.add_metric([str(self._max_loras), waiting, running], time.time())
            yield lora

    def _counters(self) -> Iterator[Metric]:
        computed = self.prompt_tokens - self.prompt_tokens_cached
        by_source = dict(zip(PROMPT_SOURCES, (computed, self.prompt_tokens_cached, 0)))
        by_cache = {source: self.prefix_hits if source == "device" else 0 for source in CACHE_SOURCES}
        simple: tuple[tuple[str, str, float], ...] = (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                self.prefix_queries,
            ),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", self.prefix_hits),
            ("external_prefix_cache_queries", "External prefix cache queries, in number of queried tokens.", 0),
            ("external_prefix_cache_hits", "External prefix cache hits, in number of cached tokens.", 0),
            ("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", 0),
            ("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", 0),
            ("num_preemptions", "Cumulative number of preemption from the engine.", self.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", self.prompt_tokens_cached),
            ("generation_tokens", "Number of generation tokens processed.", self.generation_tokens),
            # vLLM leaves these three at 0 unless --enable-mfu-metrics is given; the stand-in always does.
            ("estimated_flops_per_gpu", "Estimated number of floating point operations per GPU.", 0),
            ("estimated_read_bytes_per_gpu", "Estimated number of bytes read from memory per GPU.", 0),
            ("estimated_write_bytes_per_gpu", "Estimated number of bytes written to memory per GPU.", 0),
        )
        for name, text, value in simple:
            yield self._counter(name, text, value)
        yield self._counter("prompt_tokens_by_source", "Number of prompt tokens by source.", by_source, "source")
        yield self._counter(
            "prompt_tokens_cached_by_source", "Prefix-cache hit tokens by cache tier.", by_cache, "source"
        )
        yield self._counter(
            "request_success", "Count of successfully processed requests.", self.finished, "finished_reason"
        )
        yield self._counter(
            "admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            self.rejected,
            "reason",
            engine=False,
        )

    def _histograms(self) -> Iterator[Metric]:
        distributions: tuple[tuple[str, str, Distribution], ...] = (
            ("request_prompt_tokens", "Number of prefill tokens processed.", self.request_prompt_tokens),
            ("request_generation_tokens", "Number of generation tokens processed.", self.request_generation_tokens),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", self.iteration_tokens),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                self.request_max_num_generation_tokens,
            ),
            ("request_params_n", "Histogram of the n request parameter.", self.request_params_n),
            (
                "request_params_max_tokens",
                "Histogram of the max_tokens request parameter.",
                self.request_params_max_tokens,
            ),
            (
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                self.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Histogram of inter-token latency in seconds.",
                self.inter_token_latency,
            ),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                self.request_time_per_output_token,
            ),
            (
                "e2e_request_latency_seconds",
                "Histogram of e2e request latency in seconds.",
                self.e2e_request_latency,
            ),
            (
                "request_queue_time_seconds",
                "Histogram of time spent in WAITING phase for request.",
                self.request_queue_time,
            ),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                self.request_inference_time,
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                self.request_prefill_time,
            ),
            (
                "request_decode_time_seconds",
                "Histogram of time spent in DECODE phase for request.",
                self.request_decode_time,
            ),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                self.request_num_preemptions,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                self.request_prefill_kv_computed_tokens,
            ),
        )
        for name, text, distribution in distributions:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            family.add_metric([self._model_name, "0"], distribution.cumulative(), distribution.total)
            family.add_sample(f"vllm:{name}_created", {"model_name": self._model_name, "engine": "0"}, self._created)
            yield family


class HttpMetrics:
    """Metrics of the HTTP server, as prometheus-fastapi-instrumentator gives them to vLLM."""

    EXCLUDED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})

    def __init__(self, registry: CollectorRegistry) -> None:
        handler = ["handler"]
        self._requests = Counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self._request_size = Summary(
            "http_request_size_bytes", "Content length of incoming requests by handler.", handler, registry=registry
        )
        self._response_size = Summary(
            "http_response_size_bytes", "Content length of outgoing responses by handler.", handler, registry=registry
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels.",
            buckets=HTTP_FINE,
            registry=registry,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "Latency with only few buckets by handler.",
            ["method", "handler"],
            buckets=HTTP_COARSE,
            registry=registry,
        )

    def observe(
        self, method: str, handler: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count a request that has been answered."""
        if handler in self.EXCLUDED:
            return
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._request_size.labels(handler).observe(request_bytes)
        self._response_size.labels(handler).observe(response_bytes)
        self._fine.observe(seconds)
        self._coarse.labels(method, handler).observe(seconds)


def _frozen(value: object) -> object:
    if isinstance(value, Distribution):
        return tuple(value.counts), value.total
    if isinstance(value, Mapping):
        return tuple(value.items())
    return value if isinstance(value, (str, int, float, type(None))) else tuple(value)  # type: ignore[arg-type]


class MetricsPage:
    """What ``/metrics`` shows: metrics of the process, of Python and of HTTP (`registry`), and those of the engine.

    Schedulers and agents ask some ten times a second. An engine that has nothing to do would spend a tenth of a core on
    that, so what it says of itself is written anew only when it has changed.
    """

    def __init__(self, engine: EngineMetrics) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._engine = engine
        self._engine_registry = CollectorRegistry()
        self._engine_registry.register(engine)
        self._state: tuple[object, ...] = ()
        self._written = b""

    def text(self) -> bytes:
        """The page in the text format of Prometheus."""
        state = self._engine.state()
        if state != self._state:
            self._state, self._written = state, generate_latest(self._engine_registry)
        return generate_latest(self.registry) + self._written
