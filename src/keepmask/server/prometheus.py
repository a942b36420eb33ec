"""`Metrics`: what Prometheus is told. Names and meanings are vLLM's where vLLM has them; label values are fixed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import get_args

import numpy as np
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from keepmask.engine.core import EngineStats
from keepmask.engine.ticket import Ticket
from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, FinishReason

__all__ = ["MEDIA_TYPE", "Metrics"]

MEDIA_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SUPPORT = (1, 2, 3, 5, 8, 12, 20, 32, 50, 80, 128, 256, 512, 1024, 4096, 16_384, 65_536)
_UNCOUNTED = 10_000  # rows that are put into buckets at a time


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, stats: Callable[[], EngineStats], *, model_name: str, vocab_size: int) -> None:
        self._registry = CollectorRegistry()
        self._supports = _Supports(model_name, vocab_size)
        self._registry.register(_EngineCollector(stats, model_name))
        self._registry.register(self._supports)
        text = "Time between two steps that drew tokens of a request."
        self._gaps = _Bulk("vllm:inter_token_latency_seconds", text, _SECONDS, model_name)
        self._registry.register(self._gaps)
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return metric.labels(model_name)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.").labels(model_name)
        self._queried_tokens = counter(
            "vllm:prefix_cache_queries", "Prompt tokens whose keys and values were looked for in the cache."
        ).labels(model_name)
        self._cached_tokens = counter(
            "vllm:prefix_cache_hits", "Prompt tokens whose keys and values were taken from the cache."
        ).labels(model_name)
        success = counter("vllm:request_success", "Completions that ended, by the reason.", "finished_reason")
        self._finished = {reason: success.labels(model_name, reason) for reason in get_args(FinishReason)}
        self._failed = counter("keepmask:request_failures", "Requests answered with an error instead.").labels(
            model_name
        )
        self._first_token_s = histogram("vllm:time_to_first_token_seconds", "From submission to token one.", _SECONDS)
        self._queue_s = histogram("vllm:request_queue_time_seconds", "From submission to the first step.", _SECONDS)
        self._prefill_s = histogram("vllm:request_prefill_time_seconds", "From there to the first token.", _SECONDS)
        self._decode_s = histogram("vllm:request_decode_time_seconds", "From there to the last token.", _SECONDS)
        self._inference_s = histogram("vllm:request_inference_time_seconds", "Prefill and decode time.", _SECONDS)
        self._each_s = histogram(
            "vllm:request_time_per_output_token_seconds", "Decode time over the tokens after the first.", _SECONDS
        )
        self._whole_s = histogram("vllm:e2e_request_latency_seconds", "From submission to the end.", _SECONDS)
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", _TOKENS)
        self._completion_len = histogram("vllm:request_generation_tokens", "Tokens of all completions.", _TOKENS)

    def watch(self, ticket: Ticket) -> None:
        """Count what is delivered to the ticket, and how it ends."""
        count = _Count()
        ticket.on_delivery = partial(self._on_delivery, count)
        ticket.on_end(partial(self._on_end, ticket, count))

    def on_step(self, ticket: Ticket) -> None:
        """Count the time since the ticket's last tokens. On the engine's thread, before they are collected."""
        if ticket.times.last_token_s is not None:
            self._gaps.add([time.monotonic() - ticket.times.last_token_s])

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _on_delivery(self, count: _Count, outputs: Sequence[CompletionOutput]) -> None:
        for output in outputs:
            count.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._finished[output.finish_reason].inc()
            if output.sampling_mask is not None:
                self._supports.add(output.sampling_mask)

    def _on_end(self, ticket: Ticket, count: _Count) -> None:
        times, prompt_len = ticket.times, len(ticket.order.prompt_token_ids)
        if ticket.failed:
            self._failed.inc()
            return
        self._prompt_tokens.inc(prompt_len)
        if ticket.order.params.prompt_logprobs is None:
            self._queried_tokens.inc(prompt_len)
        self._cached_tokens.inc(ticket.num_cached_tokens)
        self._prompt_len.observe(prompt_len)
        self._completion_len.observe(count.tokens)
        self._whole_s.observe(time.monotonic() - times.submitted_s)
        if times.scheduled_s is None:
            return
        self._queue_s.observe(times.scheduled_s - times.submitted_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        decode_s, intervals = times.last_token_s - times.first_token_s, count.tokens / ticket.order.params.n - 1
        self._first_token_s.observe(times.first_token_s - times.submitted_s)
        self._prefill_s.observe(times.first_token_s - times.scheduled_s)
        self._decode_s.observe(decode_s)
        self._inference_s.observe(times.last_token_s - times.scheduled_s)
        if intervals > 0:
            self._each_s.observe(decode_s / intervals)


class _Count:
    """Tokens delivered to one ticket."""

    def __init__(self) -> None:
        self.tokens = 0


class _EngineCollector(Collector):
    """The engine's own numbers, read when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats, self._labels = stats, [model_name]

    def collect(self) -> Iterator[Metric]:
        """The numbers as they are now."""
        stats = self._stats()
        used = 1 - stats.num_free_blocks / stats.num_blocks
        yield self._gauge("vllm:num_requests_running", "Completions that are being computed.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Completions that wait for a place.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 being all of it.", used)
        yield self._counter(
            "vllm:num_preemptions", "Completions that had to give up their place.", stats.num_preemptions
        )
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens)
        yield self._counter("keepmask:engine_steps", "Forwards computed.", stats.num_steps)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family


class _Bulk(Collector):
    """A histogram of many values, put into buckets in bulk: there is one a token, or more."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._labels = name, text, [model_name]
        self._bounds = np.asarray(bounds)
        self._lock = threading.Lock()
        self._buckets = np.zeros(len(bounds) + 1, np.int64)
        self._uncounted: list[float] = []
        self._total = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count these values."""
        with self._lock:
            self._uncounted += values
            if len(self._uncounted) > _UNCOUNTED:
                self._count()

    def _count(self) -> None:
        values, self._uncounted = np.asarray(self._uncounted, np.float64), []
        self._buckets += np.bincount(np.searchsorted(self._bounds, values), minlength=self._buckets.size)
        self._total += float(values.sum())

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now."""
        with self._lock:
            self._count()
        names = [*map(floatToGoString, self._bounds.tolist()), "+Inf"]
        metric = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        metric.add_metric(self._labels, list(zip(names, np.cumsum(self._buckets).tolist(), strict=True)), self._total)
        return [metric]


class _Supports(Collector):
    """Sizes of the supports that were sent."""

    def __init__(self, model_name: str, vocab_size: int) -> None:
        self._labels, self._vocab_size = [model_name], vocab_size
        text = "Ids that could have been drawn, for each token sent."
        self._sizes = _Bulk("keepmask:support_size", text, _SUPPORT, model_name)
        self._whole_rows = self._stored_ids = self._rows = 0

    def add(self, mask: SamplingMask) -> None:
        """Count the rows of a mask; no id stored means the whole vocabulary."""
        counts = mask.counts
        whole = int((counts == 0).sum())
        self._rows += len(mask)
        self._stored_ids += mask.ids.size
        self._whole_rows += whole
        self._sizes.add((np.where(counts == 0, self._vocab_size, counts) if whole else counts).tolist())

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now."""
        stored = CounterMetricFamily(
            "keepmask:mask_bytes", "Bytes of the masks sent, as int32 ids and row ends.", labels=["model_name"]
        )
        stored.add_metric(self._labels, 4 * (self._stored_ids + self._rows))
        whole = CounterMetricFamily(
            "keepmask:whole_vocabulary_rows", "Rows sent whose support is the whole vocabulary.", labels=["model_name"]
        )
        whole.add_metric(self._labels, self._whole_rows)
        return [*self._sizes.collect(), stored, whole]
