"""Hook: ``vllm/v1/metrics/loggers.py`` ``StatLoggerManager.__init__``, in the HTTP server's process.

What: a stat logger of VAMP's own comes first in the list, and exports what the scheduler has sent. Why: the
scheduler's process has no Prometheus page, and the entry point for stat loggers
(``vllm.stat_logger_plugins``) would also turn statistics on in engines without VAMP that have them switched
off. How: wraps the method once (marked). It goes when vLLM lets an engine's configuration name stat loggers.
"""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager

from vamp_integration import metrics, settings


class VampStatLogger(AggregateStatLoggerBase):
    """Exports VAMP's metrics, labelled as vLLM labels its own: ``model_name`` and ``engine``."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        _unregister()
        self._seen: dict[int, dict[str, int]] = {index: {} for index in engine_indexes}
        self._series: dict[int, dict[str, tuple[metrics.Metric, Any]]] = {index: {} for index in self._seen}
        for metric in metrics.METRICS:
            family = _family(metric)
            for index in engine_indexes:
                labels = (vllm_config.model_config.served_model_name, str(index))
                for value in metric.values:
                    child = family.labels(*labels, *([value] if metric.label else []))
                    self._series[index][metric.key(value)] = (metric, child)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take VAMP's values out of ``scheduler_stats``; only series that have changed are touched."""
        if scheduler_stats is None:
            return
        seen = self._seen[engine_idx]
        for key, value in metrics.take(scheduler_stats).items():
            before = seen.get(key, 0)
            metric, series = self._series[engine_idx][key]
            if value == before or (metric.counter and value < before):
                continue  # a counter that fell would end vLLM's engine here; it stands until it has caught up
            seen[key] = value
            if metric.counter:
                series.inc((value - before) * metric.unit)
            else:
                series.set(value * metric.unit)

    def log_engine_initialized(self) -> None:
        """Nothing to log: the worker has."""


def install() -> None:
    """Wrap ``StatLoggerManager.__init__``; calling it again changes nothing."""
    original = StatLoggerManager.__init__
    if getattr(original, "vamp_wrapped", False):
        return

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if settings.of(vllm_config) is not None:
            # First, so that vLLM's loggers find their own values only.
            self.stat_loggers.insert(0, VampStatLogger(vllm_config, self.engine_indexes))

    init.vamp_wrapped = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = init  # type: ignore[method-assign]


def _family(metric: metrics.Metric) -> Gauge | Counter:
    name, labels = metrics.PREFIX + metric.name, ["model_name", "engine", *filter(None, [metric.label])]
    if metric.counter:
        return Counter(name, metric.help, labels)
    return Gauge(name, metric.help, labels, multiprocess_mode="mostrecent")


def _unregister() -> None:
    """Forget what an earlier engine in this process exported, as vLLM does with its own metrics."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(metrics.PREFIX):
            REGISTRY.unregister(collector)
