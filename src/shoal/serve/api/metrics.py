"""Metrics of the served models for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.runs.monitoring.prometheus import Metric, MetricSample
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.model_pool import ModelState

_TOTALS: tuple[tuple[str, str, str, Callable[[BatchingEngine], int]], ...] = (
    ("shoal_prompt_tokens_total", "read", "Tokens of prompts that the model has read.", lambda engine: engine.tokens_read),
    ("shoal_reused_tokens_total", "reused", "Tokens of prompts from the prefix cache.", lambda engine: engine.tokens_reused),
    ("shoal_written_tokens_total", "written", "Tokens that were generated.", lambda engine: engine.tokens_written),
    ("shoal_proposed_tokens_total", "proposed", "Proposed tokens that the model has verified.", lambda engine: engine.tokens_proposed),
    ("shoal_accepted_tokens_total", "accepted", "Proposed tokens that were right.", lambda engine: engine.tokens_accepted),
)
_GAUGES: tuple[tuple[str, str, Callable[[BatchingEngine], int]], ...] = (
    ("shoal_kept_tokens", "Tokens in the prefix cache.", lambda engine: engine.prefixes.tokens),
    ("shoal_requests_running", "Answers that are being generated.", lambda engine: len(engine.running)),
    ("shoal_requests_waiting", "Answers that wait to be generated.", lambda engine: len(engine.waiting)),
    ("shoal_places", "Answers that can be generated at once.", lambda engine: engine.most_running),
)


def pool_metrics(states: Sequence[ModelState], answered: Mapping[int, int]) -> list[Metric]:
    """Requests by status; tokens and requests of each model, those of its adapters included."""
    by_status = [MetricSample(count, {"status": str(status)}) for status, count in sorted(answered.items())]
    found = [Metric("shoal_requests_total", "counter", "Requests by HTTP status.", by_status)]
    models = [(state, {"model": state.name}) for state in states if state.parent is None]
    for name, key, text, count in _TOTALS:
        samples = [MetricSample(state.counts[key] + (count(state.loaded.engine) if state.loaded else 0), label) for state, label in models]
        found.append(Metric(name, "counter", text, samples))
    for name, text, count in _GAUGES:
        samples = [MetricSample(count(state.loaded.engine), label) for state, label in models if state.loaded is not None]
        found.append(Metric(name, "gauge", text, samples))
    loaded = [MetricSample(int(state.loaded is not None), label) for state, label in models]
    sizes = [MetricSample(state.nbytes if state.loaded else 0, label) for state, label in models]
    found.append(Metric("shoal_model_loaded", "gauge", "Whether the model is in memory.", loaded))
    found.append(Metric("shoal_model_bytes", "gauge", "Memory that counts as the model's: weights, and caches of its answers.", sizes))
    return found
